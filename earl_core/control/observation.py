"""Stages observed while they run: what they took, what they had no room for, what a switch cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from earl_core.control.announce import announce_infeasible
from earl_core.control.failure_diagnosis import Infeasible, StageInfeasible, diagnose
from earl_core.control.hardware import memory_in_use
from earl_core.control.run_controller import RunController
from earl_core.selector import Predictor, SelectionInput, StageDeployment
from earl_core.selector.choice.switch_cost import move_between
from earl_core.selector.model.memory_model import gib
from earl_core.selector.model.roofline import Load
from earl_core.selector.profile.observations import (
    Kind,
    Observation,
    decode_rate,
    training_rate,
)
from earl_core.system import fault_points
from earl_core.system.files import read_file

logger = logging.getLogger(__name__)


def load_of(rollout: Mapping[str, float]) -> Load:
    """What the iteration asked of its stages, from the metrics of its rollout."""
    turns = rollout["turns/mean"]
    return Load(
        episodes=max(1, round(rollout["episodes"] + rollout.get("episodes_failed", 0.0))),
        context=max(1.0, rollout["context/mean"]),
        longest=max(1.0, rollout["context/max"]),
        generated=rollout["tokens_per_turn"] * turns,
        turns=max(1.0, turns),
        tool_wait=rollout.get("load/tool_wait_seconds", 0.0),
    )


def given_of(controller: RunController, iteration: int) -> SelectionInput:
    """What the iteration's plan was chosen from."""
    path = controller.run.stage_path(iteration, "selection").with_suffix(".input")
    return SelectionInput.model_validate_json(read_file(path))


def observe_stage(
    controller: RunController,
    stage: str,
    deployment: StageDeployment,
    iteration: int,
    load: Load,
    seconds: float,
    device_peak_bytes: float = 0.0,
) -> None:
    """Write down what a stage took that has just ended.

    seconds: of its work alone, neither start nor switch nor checkpoint. device_peak_bytes: the
    largest of its ranks' peaks on their GPUs.
    """
    predictor = _predictor(controller, stage, iteration)
    if predictor is None:
        return
    candidate = predictor.candidate_of(deployment)
    peak = device_peak_bytes
    if not controller.hardware.gpus:
        peak = controller.groups.peak_bytes(stage) / candidate.ranks
    if stage == "rollout":
        rate = decode_rate(predictor.roofline, candidate, load, seconds)
        requests = load.offered(candidate)
    else:
        rate, requests = training_rate(load, seconds), float(load.episodes)
    controller.observed.add(
        Observation(
            iteration=iteration,
            stage=stage,
            kind="measured",
            deployment=deployment,
            context=load.context,
            longest=load.longest,
            requests=requests,
            tokens_per_second=rate,
            seconds=seconds,
            peak_bytes=peak,
            formula_bytes=predictor.formula_peak(candidate, load),
            reserved_bytes=reserved_bytes(controller, stage),
        )
    )


def _predictor(controller: RunController, stage: str, iteration: int) -> Predictor | None:
    """The one that the iteration's plan came from; None for a model that it cannot predict."""
    try:
        return Predictor(given_of(controller, iteration))
    except (OSError, ValueError) as error:
        logger.debug("%s of iteration %d is not observed: %s", stage, iteration, error)
        return None


def reserved_bytes(controller: RunController, stage: str) -> float:
    """Bytes of the host that others than the stage's own processes hold right now."""
    if controller.hardware.gpus:
        return 0.0
    return max(0.0, memory_in_use() - controller.groups.bytes_now(stage))


@contextmanager
def fitting(
    controller: RunController,
    stage: str,
    iteration: int,
    deployment: StageDeployment,
    load: Load | None = None,
) -> Iterator[None]:
    """Around a stage's work: what shows that it is infeasible is written down and raised as
    `StageInfeasible`; all else passes.

    Under a policy that does not move the stage, running out of memory is an error like others.
    """
    try:
        yield
    except Exception as error:
        found = diagnose(error)
        if found is None:
            raise
        if found.stage not in ("", stage):
            # Its group holds the memory of another stage's work.
            logger.info("%s failed for %s", stage, found.stage)
        movable = found.kind == "context_overflow" or stage in controller.config.selector.moves
        seen = _infeasible(controller, stage, iteration, deployment, found, load, movable)
        controller.observed.add(seen)
        controller.run.note(iteration, stage, f"infeasible: {found.kind.replace('_', ' ')}")
        fault_points.point(f"{stage}.unfit", iteration)
        if not movable:
            raise
        announce_infeasible(controller, seen)
        raise StageInfeasible(seen.model_dump(mode="json"), _reason(seen, error)) from error


def observe_lost_engine(
    controller: RunController, iteration: int, deployment: StageDeployment, error: BaseException
) -> None:
    """Write down that an engine ran out of memory whose episodes others have played."""
    found = diagnose(error)
    if found is not None:
        seen = _infeasible(
            controller, "rollout", iteration, deployment, found, None, answered=False
        )
        controller.observed.add(seen)


def _infeasible(
    controller: RunController,
    stage: str,
    iteration: int,
    deployment: StageDeployment,
    found: Infeasible,
    load: Load | None,
    answered: bool,
) -> Observation:
    predictor = _predictor(controller, stage, iteration)
    seen = Observation(
        iteration=iteration,
        stage=stage,
        kind=found.kind,
        deployment=deployment,
        longest=found.tokens,
        answered=answered,
        reserved_bytes=reserved_bytes(controller, stage),
    )
    if predictor is None or found.kind == "context_overflow":
        return seen
    load = load or predictor.now
    candidate = predictor.candidate_of(deployment)
    peak = 0.0 if controller.hardware.gpus else controller.groups.peak_bytes(stage)
    if stage != "rollout":
        # All that there was for the stage was not enough, whatever a sample of its use has caught.
        # Engines take what they are given: of them the candidate is ruled out, and no size.
        peak = max(peak, predictor.budget(stage))
    numbers = {
        "context": load.context,
        "longest": load.longest,
        "requests": float(load.episodes),
        "peak_bytes": peak / predictor.sharers(candidate),
        "formula_bytes": predictor.formula_peak(candidate, load),
    }
    return seen.model_copy(update=numbers)


def _reason(seen: Observation, error: BaseException) -> str:
    formula = f"The memory formula had said {gib(seen.formula_bytes)} a device. "
    others = f"Others held {gib(seen.reserved_bytes)} of the host. " if seen.reserved_bytes else ""
    return (formula if seen.formula_bytes else "") + others + f"The error: {error}"


@contextmanager
def timing_switch(
    controller: RunController, stage: str, deployment: StageDeployment, iteration: int
) -> Iterator[None]:
    """Around what brings a stage's group into its stage deployment: writes down what that took, if
    processes were started or live ones exchanged their state."""
    before = controller.groups.live(stage)
    old = before.deployment if before is not None else None
    started = time.perf_counter()
    yield
    after, seconds = controller.groups.live(stage), time.perf_counter() - started
    if after is None:
        return
    if ahead := controller.groups.started_ahead(stage):
        observe_switch(controller, stage, deployment, iteration, ahead.seconds(started))
    elif after is not before:
        observe_switch(controller, stage, deployment, iteration, seconds)
    elif old and move_between(StageDeployment(**old), deployment) == "reshard":
        observe_switch(controller, stage, deployment, iteration, seconds, "resharded")


def observe_switch(
    controller: RunController,
    stage: str,
    deployment: StageDeployment,
    iteration: int,
    seconds: float,
    kind: Kind = "switched",
) -> None:
    """Write down what another stage deployment took. kind: `switched` or `resharded`."""
    controller.observed.add(
        Observation(
            iteration=iteration,
            stage=stage,
            kind=kind,
            deployment=deployment,
            seconds=seconds,
        )
    )
