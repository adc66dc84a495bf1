"""Stages observed while they run: what they took, what they had no room for, what a switch cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.control.failure_diagnosis import Infeasible, StageInfeasible, diagnose
from earl_core.control.run_controller import RunController
from earl_core.selector.choice.changes import infeasible_text
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.selection import SelectionInput
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
from earl_core.system.cgroups import memory_in_use
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


def reserved_bytes(controller: RunController, stage: str) -> float:
    """Bytes of the host that others than the stage's own processes hold right now."""
    if controller.hardware.gpus:
        return 0.0
    return max(0.0, memory_in_use() - controller.groups.bytes_now(stage))


class StageWatch:
    """Writes down what one stage does in one iteration, under its stage deployment there."""

    def __init__(
        self, controller: RunController, deployment: StageDeployment, iteration: int
    ) -> None:
        self._controller, self._deployment = controller, deployment
        self._stage, self._iteration = deployment.stage, iteration

    def measured(self, load: Load, seconds: float, device_peak_bytes: float = 0.0) -> None:
        """What the stage took that has just ended.

        seconds: of its work alone, neither start nor switch nor checkpoint. device_peak_bytes: the
        largest of its ranks' peaks on their GPUs.
        """
        predictor = self._predictor()
        if predictor is None:
            return
        candidate, peak = predictor.candidate_of(self._deployment), device_peak_bytes
        if not self._controller.hardware.gpus:
            peak = self._controller.groups.peak_bytes(self._stage) / candidate.ranks
        if self._stage == "rollout":
            rate = decode_rate(predictor.roofline, candidate, load, seconds)
            requests = load.offered(candidate)
        else:
            rate, requests = training_rate(load, seconds), float(load.episodes)
        self._add(
            "measured",
            context=load.context,
            longest=load.longest,
            requests=requests,
            tokens_per_second=rate,
            seconds=seconds,
            peak_bytes=peak,
            formula_bytes=predictor.formula_peak(candidate, load),
            reserved_bytes=reserved_bytes(self._controller, self._stage),
        )

    def switched(self, seconds: float, kind: Kind = "switched") -> None:
        """What another stage deployment took. kind: `switched` or `resharded`."""
        self._add(kind, seconds=seconds)

    def lost_engine(self, error: BaseException) -> None:
        """That an engine ran out of memory whose episodes others have played."""
        infeasible = diagnose(error)
        if infeasible is not None:
            self._infeasible(infeasible, None, answered=False)

    @contextmanager
    def fitting(self, load: Load | None = None) -> Iterator[None]:
        """Around the stage's work: what shows that it is infeasible is written down and raised as
        `StageInfeasible`; all else passes.

        Under a policy that does not move the stage, running out of memory is an error like others.
        """
        try:
            yield
        except Exception as error:
            controller, stage, iteration = self._controller, self._stage, self._iteration
            infeasible = diagnose(error)
            if infeasible is None:
                raise
            if infeasible.stage not in ("", stage):
                # Its group holds the memory of another stage's work.
                logger.info("%s failed for %s", stage, infeasible.stage)
            moves = controller.config.selector.moves
            movable = infeasible.kind == "context_overflow" or stage in moves
            seen = self._infeasible(infeasible, load, movable)
            text = f"infeasible: {infeasible.kind.replace('_', ' ')}"
            controller.run.note(iteration, stage, text)
            fault_points.point(f"{stage}.unfit", iteration)
            if not movable:
                raise
            controller.listener(stage, iteration, {"repeated": infeasible_text(seen)})
            raise StageInfeasible(seen.model_dump(mode="json"), _reason(seen, error)) from error

    @contextmanager
    def timing_switch(self) -> Iterator[None]:
        """Around what brings the stage's group into its stage deployment: writes down what that
        took, if processes were started or live ones exchanged their state."""
        groups, started = self._controller.groups, time.perf_counter()
        before = groups.live(self._stage)
        old = before.deployment if before is not None else None
        yield
        after, seconds = groups.live(self._stage), time.perf_counter() - started
        if after is None:
            return
        if ahead := groups.started_ahead(self._stage):
            self.switched(ahead.seconds(started))
        elif after is not before:
            self.switched(seconds)
        elif old and move_between(StageDeployment(**old), self._deployment) == "reshard":
            self.switched(seconds, "resharded")

    def _add(self, kind: Kind, **numbers: Any) -> Observation:
        seen = Observation(
            iteration=self._iteration,
            stage=self._stage,
            kind=kind,
            deployment=self._deployment,
            **numbers,
        )
        self._controller.observed.add(seen)
        return seen

    def _predictor(self) -> Predictor | None:
        """The one that the iteration's plan came from; None for a model that it cannot predict."""
        path = self._controller.run.stage_path(self._iteration, "selection").with_suffix(".input")
        try:
            return Predictor(SelectionInput.model_validate_json(read_file(path)))
        except (OSError, ValueError) as error:
            logger.debug("%s of %d is not observed: %s", self._stage, self._iteration, error)
            return None

    def _infeasible(self, infeasible: Infeasible, load: Load | None, answered: bool) -> Observation:
        numbers: dict[str, Any] = {"longest": infeasible.tokens}
        predictor = self._predictor()
        if predictor is not None and infeasible.kind != "context_overflow":
            load = load or predictor.now
            candidate = predictor.candidate_of(self._deployment)
            gpus = self._controller.hardware.gpus
            peak = 0.0 if gpus else self._controller.groups.peak_bytes(self._stage)
            if self._stage != "rollout":
                # All that there was for the stage was not enough, whatever a sample of its use has
                # caught. Engines take what they are given: of them the candidate is ruled out, and
                # no size.
                peak = max(peak, predictor.budget(self._stage))
            numbers = {
                "context": load.context,
                "longest": load.longest,
                "requests": float(load.episodes),
                "peak_bytes": peak / predictor.sharers(candidate),
                "formula_bytes": predictor.formula_peak(candidate, load),
            }
        reserved = reserved_bytes(self._controller, self._stage)
        return self._add(infeasible.kind, answered=answered, reserved_bytes=reserved, **numbers)


def _reason(seen: Observation, error: BaseException) -> str:
    formula = f"The memory formula had said {gib(seen.formula_bytes)} a device. "
    others = f"Others held {gib(seen.reserved_bytes)} of the host. " if seen.reserved_bytes else ""
    return (formula if seen.formula_bytes else "") + others + f"The error: {error}"
