"""One stage of an iteration: whether it is finished, and what happens while it runs.

Its time and memory go into its manifest, of which `observe` makes the selector's observations once
the iteration is done. A lack of memory and the cost of a switch are written down at once. Lost
ranks are counted, and the stage that they cost is repeated.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from earl_core.control.failure_diagnosis import (
    Infeasible,
    RanksLost,
    StageInfeasible,
    diagnose,
    loss_of,
)
from earl_core.control.resume_point import is_updated
from earl_core.control.run_controller import RunController, Verdict
from earl_core.deployment.stage_deployment import StageDeployment, move_between
from earl_core.deployment.stages import PLAYED, STAGES, TRAINED, rows_of, stage_of
from earl_core.dispatch import Manifest
from earl_core.experience.alike_groups import TRAINED_EPISODES
from earl_core.run import stage_key
from earl_core.run.group_batches import misfit
from earl_core.run.inherited_stages import recovered
from earl_core.run.record import key_uid
from earl_core.selector.choice.changes import infeasible_text
from earl_core.selector.choice.expected_load import computed_load, in_play, trained_load
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.memory_model import gib
from earl_core.selector.model.roofline import Load
from earl_core.selector.profile.observations import (
    Kind,
    Observation,
    decode_rate,
    training_rate,
)
from earl_core.system import fault_points
from earl_core.system.errors import EarlError
from earl_core.system.files import read_file
from earl_core.system.memory import memory_in_use

logger = logging.getLogger(__name__)

_LEAST_WAITED = 0.1
"""Share of the seconds between two batches of a stream in which the second was waited for, from
which on the engines are taken to have been busy."""


def load_of(rollout: Mapping[str, float]) -> Load:
    """Compute the load that the iteration put on its stages, from the metrics of its rollout, or of
    its demonstrations."""
    turns = rollout["turns/mean"]
    return Load(
        episodes=max(1, round(rollout["episodes"] + rollout.get("episodes_failed", 0.0))),
        context=max(1.0, rollout["context/mean"]),
        longest=max(1.0, rollout["context/max"]),
        generated=rollout["tokens_per_turn"] * turns,
        turns=max(1.0, turns),
        tool_wait=rollout.get("load/tool_wait_seconds", 0.0),
    )


def training_load(rollout: Manifest) -> Load:
    """Compute the load of the stages that read the iteration's rollout: of the episodes that are
    trained on."""
    trained = rollout.outputs.get(TRAINED_EPISODES)
    load = load_of(rollout.metrics)
    if trained is not None:
        return load._replace(episodes=max(1, len(trained)))
    again = rollout.metrics.get("episodes_replayed", 0.0)
    return load._replace(episodes=load.episodes + round(again))


def reserved_bytes(controller: RunController, stage: str) -> float:
    """Bytes of the host that others than the stage's own processes hold right now."""
    if controller.hardware.gpus:
        return 0.0
    return max(0.0, memory_in_use() - controller.groups.bytes_now(stage))


def observe(controller: RunController, manifests: Mapping[str, Manifest]) -> None:
    """Add to the run's observations what the stages of an iteration took, by their manifests; each
    once, however often this is called."""
    rows = rows_of(manifests)
    iteration = rows.iteration
    predictor = _predictor(controller, iteration)
    if predictor is None:
        return
    training = training_load(rows)
    known = [seen for seen in controller.observed.through(iteration) if seen.kind == "measured"]
    for manifest in manifests.values():
        if "deployment" not in manifest.outputs:
            continue
        played = stage_of(manifest.stage) in PLAYED
        load = load_of(manifest.metrics) if played else training
        seen = _measured(controller, predictor, load, manifest)
        if seen not in known:
            controller.observed.add(seen)


def _measured(
    controller: RunController, predictor: Predictor, load: Load, manifest: Manifest
) -> Observation:
    deployment = StageDeployment(**manifest.outputs["deployment"])
    candidate, metrics = predictor.candidate_of(deployment), manifest.metrics
    if skipped := metrics.get("skipped_tokens_share", 0.0):
        # What the update left out took neither time nor memory.
        load = load._replace(episodes=max(1, round((1.0 - skipped) * load.episodes)))
    seconds, requests = metrics["seconds"], float(load.episodes)
    if deployment.stage == "rollout":
        load = load._replace(in_play=in_play(predictor.given))
        rate = decode_rate(predictor.roofline, candidate, load, seconds)
        requests = load.offered(candidate)
    else:
        rate = training_rate(load, seconds)
    shares = controller.config.divides and predictor.division.placement == "shared"
    # Engines that nobody waited for may have had nothing to play.
    if shares or metrics.get("stage_seconds", seconds) < _LEAST_WAITED * seconds:
        # The seconds of two stages on the same cores say nothing of either by itself.
        rate = 0.0
    if controller.hardware.gpus:
        peak = metrics.get("peak_cuda_bytes", 0.0)
    else:
        peak = metrics["peak_bytes"] / candidate.ranks
    return Observation(
        iteration=manifest.iteration,
        stage=deployment.stage,
        kind="measured",
        deployment=deployment,
        context=load.context,
        longest=load.longest,
        requests=requests,
        tokens_per_second=rate,
        seconds=seconds,
        peak_bytes=peak,
        formula_bytes=predictor.formula_peak(candidate, load),
        reserved_bytes=metrics["reserved_bytes"],
    )


def _predictor(controller: RunController, iteration: int) -> Predictor | None:
    """The one that the iteration's plan came from; None for a model that it cannot predict."""
    path = controller.run.stage_path(iteration, "selection").with_suffix(".input")
    plan = controller.run.plan(iteration)
    try:
        given = SelectionInput.model_validate_json(read_file(path))
        return Predictor(given, division=plan.division if plan is not None else None)
    except (OSError, ValueError) as error:
        logger.debug("iteration %d is not observed: %s", iteration, error)
        return None


class StageWatch:
    """Writes down what one stage does in one iteration, under its stage deployment there."""

    def __init__(
        self, controller: RunController, deployment: StageDeployment, iteration: int
    ) -> None:
        self._controller, self._deployment = controller, deployment
        self._stage, self._iteration = deployment.stage, iteration

    def measured(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Outputs by which `observe` knows the stage that has just ended; also adds to its metrics
        the bytes that others held of the host, or of the fullest GPU."""
        metrics["reserved_bytes"] = metrics.get(
            "other_cuda_bytes", reserved_bytes(self._controller, self._stage)
        )
        return {"deployment": self._deployment._asdict()}

    def switched(self, seconds: float, kind: Kind = "switched") -> None:
        """Note the seconds that another stage deployment took. kind: `switched` or `resharded`."""
        self._add(kind, seconds=seconds)

    def lost_engine(self, error: BaseException) -> None:
        """Note that an engine ran out of memory whose episodes others have played."""
        infeasible = diagnose(error)
        if infeasible is not None:
            self._infeasible(infeasible, None, answered=False)

    @contextmanager
    def fitting(self, load: Load | None = None) -> Iterator[None]:
        """Enclose the stage's work: an error that shows that it is infeasible is written down and
        raised as `StageInfeasible`; all else passes.

        Under a policy that does not move the stage, running out of memory is an error like others,
        unless a GPU's token budget is open.
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
            movable = infeasible.kind == "context_overflow" or self._movable()
            seen = self._infeasible(infeasible, load, movable)
            text = f"infeasible: {infeasible.kind.replace('_', ' ')}"
            controller.run.note(iteration, stage, text)
            fault_points.point(f"{stage}.unfit", iteration)
            if not movable:
                raise
            controller.listener(stage, iteration, {"repeated": infeasible_text(seen)})
            raise StageInfeasible(seen.model_dump(mode="json"), _reason(seen, error)) from error

    def _movable(self) -> bool:
        """Tell whether another choice can need less memory: one of the policy, or of an open token
        budget."""
        config, gpus = self._controller.config, self._controller.hardware.gpus
        smaller = gpus > 0 and config.update.max_tokens_per_microbatch is None
        return self._stage in config.selector.moves or (self._stage in TRAINED and smaller)

    @contextmanager
    def timing_switch(self) -> Iterator[None]:
        """Time the work that brings the stage's group into its stage deployment, and write the
        seconds down, if processes were started or live ones exchanged their state."""
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

    def _infeasible(self, infeasible: Infeasible, load: Load | None, answered: bool) -> Observation:
        numbers: dict[str, Any] = {"longest": infeasible.tokens}
        predictor = _predictor(self._controller, self._iteration)
        if predictor is not None and infeasible.kind != "context_overflow":
            candidate = predictor.candidate_of(self._deployment)
            given = predictor.given
            load = load or trained_load(given, self._stage, predictor.now)
            load = computed_load(given.statistics, self._stage, load, min)
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


def judge(controller: RunController, iteration: int, stage: str, inputs: Sequence[str]) -> Verdict:
    """Decide whether the stage must run; the flow asks once and the stage's task is told.

    inputs: data digests of the stage's inputs, in order.
    """
    key = key_of(controller, iteration, stage, inputs)
    known = controller.run.sealed(iteration, stage, key)
    if known is None:
        known = recovered(controller.run, iteration, stage, key)
    makes = STAGES[stage].makes if stage in STAGES else "columns"
    if known is not None and makes == "state":
        learner = controller.learners[STAGES[stage].role]
        held = learner.version == controller.run.versions.update(iteration).made
        if not held and not is_updated(controller.run, iteration, stage, checksums=True):
            known = None
    if known is not None and makes == "weights" and not weights_exist(controller, known):
        known = None
    if known is not None and stage == "collect" and (why := misfit(controller.run, known)):
        controller.run.note(iteration, stage, f"collected again: {why}")
        known = None
    verdict = Verdict(key, known)
    controller.verdicts[iteration, stage] = verdict
    return verdict


def key_of(controller: RunController, iteration: int, stage: str, inputs: Sequence[str]) -> str:
    """The key that this stage's sealed manifest must carry to count as finished."""
    run = controller.run
    branch = run.branches.key(iteration, stage_of(stage))
    return stage_key(controller.config, key_uid(run.record), iteration, stage, inputs, branch)


def weights_exist(controller: RunController, manifest: Manifest) -> bool:
    """Tell whether every host has the files that a publish manifest names, at full size."""
    files = manifest.outputs["weights"]["files"]
    return all(controller.run.stores.have(Path(file["path"]).name, file["bytes"]) for file in files)


MOST_STEPLESS = 3
"""Iterations one after another without a step; what keeps more from learning is no chance."""


def without_step(controller: RunController, iteration: int, alike: bool) -> None:
    """Count an iteration that has nothing to train on: it ends without a step.

    alike: groups have left the batch because they score alike; as often as chance wants. Otherwise
    raises `EarlError` where so many before it had no step either that something is wrong. A process
    that goes on with the run begins a new count.
    """
    if alike:
        text = "no group has rewards that differ: the iteration ends without a step"
        logger.warning("iteration %d: %s", iteration, text)
        controller.run.note(iteration, "advantage", text)
        return
    controller.stepless.add(iteration)
    row = 1
    while iteration - row in controller.stepless:
        row += 1
    what = "no group has two episodes left, so there is nothing to compare"
    if row > MOST_STEPLESS:
        raise EarlError(
            f"iteration {iteration} is number {row} in a row without a step: {what}",
            remedy="look at why the rollout's episodes fail, or raise rollout.group_size; "
            "resume the run once that is done",
        )
    text = f"{what}: the iteration ends without a step ({row} in a row, {MOST_STEPLESS} at most)"
    logger.warning("iteration %d: %s", iteration, text)
    controller.run.note(iteration, "advantage", text)


_counting = threading.Lock()


@contextmanager
def surviving(controller: RunController, iteration: int, stage: str) -> Iterator[None]:
    """Enclose a stage's work: raises `RanksLost` for lost ranks while the iteration has repeats
    left (`deadlines.repeats`), `HostsChanged` where their host is lost; all else passes, and so
    does a loss once there are none."""
    try:
        yield
    except Exception as error:
        lost = loss_of(error)
        if lost is None or controller.stop_requested.is_set():
            raise
        if (changed := controller.lost_hosts()) is not None:
            raise changed from error
        with _counting:
            controller.losses[iteration] += 1
            losses = controller.losses[iteration]
        most = controller.config.deadlines.repeats
        rank = "" if lost.rank is None else f" rank {lost.rank}"
        what = f"worker group '{lost.where.role}'{rank} was lost ({lost.reason.rstrip('.')})"
        if losses > most:
            controller.run.note(iteration, stage, f"{what}; not repeated, loss {losses} of {most}")
            raise
        text = f"{stage}: {what}; the stage is repeated from its sealed inputs ({losses} of {most})"
        controller.run.note(iteration, stage, text)
        controller.listener(stage, iteration, {"repeated": text})
        raise RanksLost(text) from error
