"""The select step: statistics of the last iterations in, a sealed DeploymentPlan out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import task
from pydantic import ValidationError

from earl_core.config.feasibility import answers_of_placement
from earl_core.control.learnt_profile import LearntProfile
from earl_core.control.machine_profile import fingerprint_of
from earl_core.control.prompt_waves import barrier_share
from earl_core.control.run_controller import RunController, controller_of
from earl_core.control.selector_policy import reason_in
from earl_core.control.stage_execution import reserved_bytes
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import SELECTABLE, STAGES
from earl_core.selector.choice.changes import stage_changes
from earl_core.selector.choice.policy import choose_as_far_as_it_fits
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.profile.observations import (
    Observation,
    attempts_of,
    calibration_of,
    forbidden_of,
    overflow_tokens,
    seconds_of,
)
from earl_core.selector.profile.profile_table import ProfileError, ProfileTable, read_table
from earl_core.system.files import canonical_json, read_file, write_atomic
from tasks.stage import StageRef, run_stage

logger = logging.getLogger(__name__)

_REMEMBERED = 8


@task(name="select")
def select(run: str, iteration: int) -> StageRef:
    """Pick every stage's deployment before anything of the iteration runs. Once more for each stage
    of the iteration that was infeasible under what was picked before."""
    controller = controller_of(run)

    def body() -> dict[str, Any]:
        given, plan = _chosen(controller, iteration)
        _write_beside(controller, given)
        # Against the iteration's earlier attempt, else the last iteration's plan.
        for change in stage_changes(given.current, plan):
            controller.listener(change.stage, iteration, {"switched": change.text})
        return {"outputs": {"plan": plan.model_dump(mode="json")}}

    return run_stage(controller, iteration, "select", body)


def _chosen(controller: RunController, iteration: int) -> tuple[SelectionInput, DeploymentPlan]:
    """The choice and what it was made from.

    Raises `NoFeasiblePlan` when none is left, but not by what was seen before a resume: memory
    that was short, or that others held, may have been another program's, and may be free now.
    """
    observed = controller.observed.known_to(iteration)
    try:
        return _as_far_as_it_fits(_selection_input(controller, iteration, observed))
    except NoFeasiblePlan:
        fresh = controller.observed.known_to(iteration, fresh=True)
        if len(fresh) == len(observed):
            raise
        logger.info("nothing is feasible by what was seen before the resume: that is tried again")
        old = observed[: len(observed) - len(fresh)]
        forgiven = [
            seen.model_copy(update={"reserved_bytes": 0.0})
            for seen in old
            if seen.kind != "out_of_memory"
        ]
        return _as_far_as_it_fits(_selection_input(controller, iteration, [*forgiven, *fresh]))


def _as_far_as_it_fits(given: SelectionInput) -> tuple[SelectionInput, DeploymentPlan]:
    chosen_from, plan = choose_as_far_as_it_fits(given)
    asked, looked = given.selector.forecast, chosen_from.selector.forecast
    if looked < asked:
        logger.warning(
            "iteration %d: if contexts go on growing so, some stage becomes infeasible within %d "
            "iterations: this plan looks %d ahead",
            given.iteration, asked, looked,
        )  # fmt: skip
    return chosen_from, plan


def select_inputs(controller: RunController, iteration: int) -> list[str]:
    """List the inputs that the step's key covers beside its settings: how often it was made before,
    for how many hosts, what a placement of the user's own answers, and where it runs ahead of
    iterations that divided the devices anew, because of a side that a stage did not fit, when they
    did."""
    placed = answers_of_placement(controller.config, controller.hardware, iteration)
    attempt = attempts_of(controller.observed.known_to(iteration), iteration)
    hosts = controller.hardware.hosts
    anew = controller.observed.divided_anew(iteration)
    return [
        *([f"attempt {attempt}"] if attempt else []),
        *([f"hosts {hosts}"] if hosts > 1 else []),
        *([f"placement {placed}"] if placed else []),
        *(f"divided anew in iteration {k}, attempt {at}" for k, at in sorted(anew.items())),
    ]


def share_profile(controller: RunController) -> None:
    """Give what the run measured of its stage deployments to the runs to come. A run under `fixed`
    measures nothing that another would choose by."""
    if controller.profile is not None and controller.config.selector.policy != "fixed":
        controller.profile.share(controller.observed.through(), controller.hardware)


def _write_beside(controller: RunController, given: SelectionInput) -> None:
    """`selection.input`, and what an earlier attempt saw as `selection.<attempt>.input`."""
    path = controller.run.stage_path(given.iteration, "selection").with_suffix(".input")
    earlier = None
    # A damaged one says nothing to anybody: the new one takes its place.
    with suppress(OSError, ValidationError):
        earlier = SelectionInput.model_validate_json(read_file(path))
    if earlier is not None and earlier.attempt < given.attempt:
        kept = canonical_json(earlier.model_dump(mode="json"))
        write_atomic(path.with_suffix(f".{earlier.attempt}.input"), kept)
    write_atomic(path, canonical_json(given.model_dump(mode="json")))


def _selection_input(
    controller: RunController, iteration: int, observed: Sequence[Observation]
) -> SelectionInput:
    attempt = attempts_of(controller.observed.known_to(iteration), iteration)
    return SelectionInput.of(
        controller.config,
        controller.hardware,
        controller.model,
        reference_models=controller.reference_models,
        iteration=iteration,
        attempt=attempt,
        iterations_left=max(1, controller.config.iterations - iteration),
        barrier_share=barrier_share(controller.config),
        policy_reason=reason_in(controller.run),
        keeps_division=_plays_already(controller, iteration),
        statistics=_statistics(controller, iteration, observed),
        current=_current(controller, iteration, attempt),
        profile=_profile(controller, iteration),
        calibration=calibration_of(observed),
        forbidden=forbidden_of(observed, iteration),
        reserved_bytes=_reserved(controller, observed),
        context_overflow=overflow_tokens(observed),
    )


def _current(controller: RunController, iteration: int, attempt: int) -> DeploymentPlan | None:
    """The plan that the worker groups follow: of an earlier attempt, else of the last iteration."""
    for number in (iteration, iteration - 1):
        plan = controller.run.plan(number)
        if plan is not None and (number < iteration or plan.attempt < attempt):
            return plan
    return None


def _plays_already(controller: RunController, iteration: int) -> bool:
    """Tell whether the iteration has devices, and others may play ahead of it on theirs; a stream's
    engines play for later ones all the time."""
    followed, schedule = controller.followed, controller.config.schedule
    if followed is None or not schedule.staleness or controller.single_iteration:
        return False
    return schedule.streams or followed.iteration >= iteration


def _statistics(
    controller: RunController, iteration: int, observed: Sequence[Observation]
) -> Statistics:
    ended = iteration - 1 - controller.config.schedule.staleness
    lines = [line for line in controller.run.metrics() if line["iteration"] <= ended]
    recent = lines[-_REMEMBERED:]

    def series(name: str) -> tuple[float, ...]:
        return tuple(float(line[name]) for line in recent if name in line)

    asked = float(controller.config.rollout.prompts_per_iteration)
    return Statistics(
        context_mean=series("rollout/context/mean"),
        context_max=series("rollout/context/max"),
        turns_mean=series("rollout/turns/mean"),
        generated_share=series("rollout/generated_share"),
        tool_wait_seconds=series("rollout/load/tool_wait_seconds"),
        left_out_share=tuple(
            _left_out(line, asked) for line in recent if line.get("update/optimizer_steps")
        ),
        played_share=tuple(played / asked for played in series("rollout/prompts")),
        switch_seconds=seconds_of(observed, "switched"),
        reshard_seconds=seconds_of(observed, "resharded"),
    )


def _left_out(line: Mapping[str, Any], asked: float) -> float:
    """Return the part of an iteration's load that its update has not computed: groups that are not
    trained on, and samples without advantage of the others. asked: groups."""
    trained = min(1.0, line.get("rollout/groups_trained", asked) / asked)
    return 1.0 - trained * (1.0 - line.get("update/skipped_tokens_share", 0.0))


def _reserved(controller: RunController, observed: Sequence[Observation]) -> dict[str, float]:
    """Return the bytes that others held when each stage last ended; of a stage that has not run
    yet, the bytes that they hold, unless it is on GPUs, which only their processes can ask."""
    known = {seen.stage: seen.reserved_bytes for seen in observed if seen.reserved_bytes > 0}
    if controller.hardware.gpus:
        return known
    return {
        stage: known[stage] if stage in known else reserved_bytes(controller, stage)
        for stage in SELECTABLE
        if STAGES[stage].takes_part(controller.config)
    }


def _profile(controller: RunController, iteration: int) -> ProfileTable:
    """The shared table of this model, machine and software with what this run has measured, as far
    as the iteration's choice may know it."""
    if controller.profile is None:
        config = controller.config
        directory = Path(config.selector.profile_directory)
        mark = fingerprint_of(config, controller.hardware, controller.model)
        try:
            table = read_table(directory, mark)
        except ProfileError:
            if config.selector.policy != "fixed":
                raise
            # Nothing is chosen by it, so nothing may fail by it.
            logger.warning("predictions go without the profile", exc_info=True)
            table = ProfileTable()
        half_life, divided = config.selector.half_life, config.schedule.staleness > 0
        given = controller.run, directory, mark, table, half_life, divided
        controller.profile = LearntProfile(*given)
    seen = controller.observed
    known = seen.known_to(iteration) if controller.config.schedule.staleness else None
    return controller.profile.table(seen.through(), controller.hardware, known)
