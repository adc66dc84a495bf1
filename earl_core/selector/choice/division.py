"""Divisions of the devices between rollout and training, and what an iteration takes under one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from earl_core.deployment.placement import Division
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import Prediction
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.memory_model import gib

Combination = Mapping[str, Prediction]
"""One for each stage."""

_MOST_PARTS = 16
"""Parts of a host's devices that a division counts in, at most."""


def divisions(given: SelectionInput) -> list[Division]:
    """The divisions on offer: the configured one alone, where they are no choice."""
    if not given.divides:
        return [given.stages.division]
    devices = given.hardware.devices_per_host
    step = -(-devices // _MOST_PARTS)
    found = [
        Division(placement="separate", engine_devices=engines)
        for engines in range(step, devices, step)
    ]
    if given.stages.placement is None:
        # The memory of a GPU is not divided between processes that work at the same time.
        shared = [] if given.hardware.gpus else [Division(placement="shared")]
        found = [Division(placement="colocated"), *shared, *found]
    running = running_division(given)
    if given.keeps_division and running is not None:
        return [running]
    return found or [given.stages.division]


def running_division(given: SelectionInput) -> Division | None:
    """The division that the running worker groups follow; None where there are none."""
    if given.current is None:
        return None
    return given.current.division or given.stages.division


def divided_anew(given: SelectionInput, chosen: Division) -> int:
    """The attempt at which devices last changed sides within the iteration; 0: they did not."""
    before = given.current
    if not given.divides or before is None or not given.attempt:
        return 0
    if running_division(given) != chosen:
        return given.attempt
    return before.divided_anew if before.iteration == given.iteration else 0


def iteration_seconds(predictor: Predictor, rows: Combination, staleness: int = 0) -> float:
    """Seconds of an iteration, one after another. staleness: versions that a rollout's may be older
    than the newest, if not the run's.

    In turn the sides add up. Side by side the greater of them counts, and a batch must have been
    played, trained and published within staleness + 1 iterations.
    """
    given = predictor.given
    staleness = staleness or given.staleness
    training, published = _sides(predictor, rows)
    rollout = rows.get("rollout")
    if rollout is None:
        return training + published
    if not staleness or "update" not in rows:
        return training + published + rollout.seconds
    training += published
    round_trip = (rollout.whole + training) / (staleness + 1)
    placed = predictor.division.placed
    if not placed.side_by_side:
        # Episodes that go on after the update need not be waited for.
        playing = max(rollout.busy, rollout.whole / (staleness + 1))
        return training + (playing if given.streams else rollout.whole)
    if predictor.division.placement == "shared":
        # What waits for environments leaves the devices to the update.
        return max(rollout.busy - rollout.waiting + training, rollout.busy, round_trip)
    return max(rollout.busy + published, training, round_trip)


def waits(predictor: Predictor, rows: Combination) -> tuple[float, float]:
    """Seconds of an iteration in which engines, and the ranks that train, have nothing to do."""
    whole = iteration_seconds(predictor, rows)
    training, published = _sides(predictor, rows)
    playing = rows["rollout"].busy
    if predictor.division.placement == "separate":
        playing += published
    return max(0.0, whole - playing), max(0.0, whole - training - published)


def _sides(predictor: Predictor, rows: Combination) -> tuple[float, float]:
    """Seconds of all that trains, one after another, and of the weights' way to the engines."""
    training = sum(row.seconds for stage, row in rows.items() if stage != "rollout")
    if "update" not in rows or "rollout" not in rows:
        return training, 0.0
    update, rollout = rows["update"].candidate, rows["rollout"].candidate
    return training, predictor.roofline.republish_seconds(update, rollout)


def lack_of_memory(predictor: Predictor, rows: Iterable[Prediction]) -> str:
    """The reason why stages that work at the same time do not fit beside each other; empty where
    they do, or take turns.

    On a host without GPUs all share the memory; on a GPU a model that scores stays where the update
    works.
    """
    if not predictor.division.placed.side_by_side:
        return ""
    given = predictor.given
    peaks = {row.candidate.stage: row.peak for row in rows}
    if predictor.memory.shared:
        held = sum(peaks.values())
        # What was seen beside a stage is the others' and that of other programs.
        others = (given.reserved_bytes.get(each, 0.0) - held + peaks[each] for each in peaks)
        held += max(0.0, *others)
        room = predictor.memory.budget(given.selector.memory_fraction, 0.0)
    else:
        held = sum(peak for stage, peak in peaks.items() if stage != "rollout")
        room = predictor.budget("update")
    if held <= room:
        return ""
    return f"all that works at the same time needs {gib(held)}, of which {gib(room)} are there"


def division_text(division: Division, given: SelectionInput) -> str:
    """Such as `separate, 2 of 8 devices for the rollout`."""
    if not division.engine_devices:
        return division.placement
    devices, hosts = given.hardware.devices_per_host, given.hardware.hosts
    part = f"{division.engine_devices} of {devices} devices" + (" of a host" if hosts > 1 else "")
    return f"{division.placement}, {part} for the rollout"
