"""What may have made a stage's outputs differ, as far as records of both runs say.

A record is evidence, no proof: each cause says what it rests on, and where none is left that is
said, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from earl_core.comparison.recorded_run import INITIAL, Place, RecordedRun
from earl_core.comparison.rows import Draws
from earl_core.comparison.seals import layout_changes
from earl_core.comparison.settings import differing, differing_settings, without_secret
from earl_core.config.stage_keys import stage_settings
from earl_core.deployment.stages import STAGES, stage_of
from earl_core.dispatch import ManifestError
from earl_core.dispatch.shards.manifest import Manifest

Kind = Literal[
    "setting", "layout", "order", "software", "machine", "attempt", "draws", "arithmetic",
    "environment", "damage", "none",
]  # fmt: skip


class Cause(NamedTuple):
    """kind: for programs. text: a sentence without its full stop."""

    kind: Kind
    text: str


Sides = tuple[RecordedRun, RecordedRun]
Seals = tuple[Manifest, Manifest]

_MACHINE = ("host", "processor", "cores")
_ELSEWHERE = ("iterations", "tracking", "checkpoint", "evaluation", "dispatch", "deadlines")
"""Settings of these sections decide nothing that stages compute."""

_USUAL = ("started", "sealed", "reused", "steps applied", "engine ", "attempt ")
"""How events of the ledger begin that every run has."""


def causes(sides: Sides, place: Place, seals: Seals | None, draws: Draws | None) -> list[Cause]:
    """All that the records name. seals: of the stage; None where only one run has it. draws: how
    the rows of a rollout part."""
    found = [*_settings(sides, place)]
    if seals is not None:
        plans = tuple(run.plan(place.iteration) for run in sides)
        stage = stage_of(place.stage)
        found += [Cause("layout", each) for each in layout_changes(stage, seals, plans)]
        found += _order(sides, place, seals)
        found += _software(sides, place, seals)
        found += _attempts(sides, place)
        found += _draws(draws)
    if not found:
        found.append(
            Cause(
                "none",
                "the records name none: settings, layout, versions and attempts are equal as far "
                "as they were noted. What is left is code that they do not cover, such as "
                "environments and reward functions, time, and the hardware",
            )
        )
    return found


def _settings(sides: Sides, place: Place) -> Iterator[Cause]:
    configs = [run.config for run in sides]
    stage = stage_of(place.stage)
    in_key: dict[str, list[object]] = {}
    if stage in STAGES:
        in_key = differing([stage_settings(config, stage) for config in configs])
    for name, values in in_key.items():
        one, other = (without_secret(name, value) for value in values)
        yield Cause("setting", f"setting {name}: {one} → {other}, on which {stage} depends")
    for name, (one, other) in differing_settings(configs).items():
        covered = any(name == key or name.startswith(f"{key}.") for key in in_key)
        if not covered and not name.startswith(_ELSEWHERE):
            beside = "" if stage == INITIAL else f", outside of the key of {stage}"
            yield Cause("setting", f"setting {name}: {one} → {other}{beside}")
    keys = [run.branches.key(place.iteration, stage) for run in sides]
    if keys[0] != keys[1]:
        begun = [run.branches.at(place.iteration) for run in sides]
        told = ["none" if each is None else f"{each.number} ({each.line})" for each in begun]
        yield Cause("draws", f"branch: {told[0]} → {told[1]}, with draws of its own")
    for run in sides:
        if run.keeps_settings(place) is False:
            yield Cause(
                "setting",
                f"{run.label} has sealed {stage} under other settings than its config.yaml holds "
                "now, or another release has",
            )


def _order(sides: Sides, place: Place, seals: Seals) -> Iterator[Cause]:
    for where in (place, *_sources(sides[0], place)):
        try:
            sealed = seals if where == place else tuple(run.manifest(where) for run in sides)
        except ManifestError:
            continue
        counts = [len(each.shards) for each in sealed]
        rows = [[entry.row_ids for entry in each.shards] for each in sealed]
        if rows[0] != rows[1]:
            one, other = rows
            ordered = sorted(one) == sorted(other)
            how = "in another order" if ordered else f"{counts[0]} → {counts[1]} shards"
            yield Cause("order", f"rows of {where.stage} are divided otherwise: {how}")


def _sources(run: RecordedRun, place: Place) -> Sequence[Place]:
    try:
        return [each for each in run.sources(place) if each.iteration == place.iteration]
    except ManifestError:
        return []


def _software(sides: Sides, place: Place, seals: Seals) -> Iterator[Cause]:
    sealers = [run.sealed_by(place) for run in sides]
    if all(each.software for each in sealers):
        for name, (one, other) in differing([each.software for each in sealers]).items():
            kind: Kind = "machine" if name in _MACHINE else "software"
            yield Cause(kind, f"{name}: {one} → {other}")
        return
    hosts = [sorted({entry.host for entry in each.shards}) for each in seals]
    if hosts[0] != hosts[1]:
        yield Cause("machine", f"host: {', '.join(hosts[0])} → {', '.join(hosts[1])}")


def _attempts(sides: Sides, place: Place) -> Iterator[Cause]:
    attempts = [run.sealed_by(place).attempt for run in sides]
    if attempts[0] != attempts[1] and None not in attempts:
        yield Cause("attempt", f"sealed in attempt {attempts[0]} → {attempts[1]}: a resumed run")
    for run in sides:
        events = [str(line["event"]) for line in run.events(place)]
        if (times := events.count("started")) > 1:
            yield Cause("attempt", f"{run.label} has begun it {times} times")
        for event in dict.fromkeys(events):
            if not event.startswith(_USUAL):
                yield Cause("attempt", f"{run.label}: {event}")


def _draws(draws: Draws | None) -> Iterator[Cause]:
    if draws is None:
        return
    if draws.scored:
        yield Cause(
            "arithmetic",
            f"rows in which equal tokens after equal ones have other log-probs: {draws.scored}. So "
            "the engine computed otherwise (temperature, weights, threads, layout, versions)",
        )
    elif draws.drawn and draws.before:
        yield Cause(
            "draws",
            f"{draws.drawn} rows part at a sampled token, and the log-probs of all {draws.before} "
            "sampled tokens before are equal, bit for bit. So the same arithmetic drew otherwise, "
            "as another seed does",
        )
    elif draws.drawn:
        yield Cause(
            "draws",
            f"{draws.drawn} rows part at their first sampled token: draws are others, or what the "
            "engine computes is",
        )
    if draws.given:
        yield Cause(
            "environment",
            f"rows that part at a token which was given, not sampled: {draws.given}. So prompts or "
            "the environment's answers are others",
        )
