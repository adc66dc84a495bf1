"""The select step: statistics of the last iterations in, a sealed DeploymentPlan out."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.files import canonical_json, write_atomic
from earl_core.selector import DeploymentPlan, SelectionInput, Statistics
from earl_core.selector import select as choose
from tasks.session import Session, get_session
from tasks.stage import StageRef, resolve, run_stage

_REMEMBERED = 8


@task(name="select")
def select(run: str, iteration: int) -> StageRef:
    """Pick every stage's deployment before anything of the iteration runs."""
    session = get_session(run)

    def body() -> dict[str, Any]:
        given = _selection_input(session, iteration)
        plan = choose(given)
        beside = session.run.stage_path(iteration, "selection").with_suffix(".input")
        write_atomic(beside, canonical_json(given.model_dump(mode="json")))
        return {"outputs": {"plan": plan.model_dump(mode="json")}}

    return run_stage(session, iteration, "select", [], body)


def plan_of(session: Session, reference: StageRef) -> DeploymentPlan:
    """The plan behind the select step's reference."""
    return DeploymentPlan.model_validate(resolve(session, reference).outputs["plan"])


def _selection_input(session: Session, iteration: int) -> SelectionInput:
    lines = [line for line in session.run.metrics() if line["iteration"] < iteration]
    current = None
    if iteration > 0 and session.run.stage_path(iteration - 1, "select").exists():
        earlier = session.run.manifest(iteration - 1, "select")
        current = DeploymentPlan.model_validate(earlier.outputs["plan"])
    recent = lines[-_REMEMBERED:]

    def series(name: str) -> tuple[float, ...]:
        return tuple(float(line[name]) for line in recent if name in line)

    return SelectionInput(
        iteration=iteration,
        rollout=session.config.rollout,
        update=session.config.update,
        layout=session.config.layout,
        experience=session.config.experience,
        needs_reference=session.config.needs_reference,
        hardware=session.hardware,
        model=session.model,
        iterations_left=max(1, session.config.iterations - iteration),
        statistics=Statistics(
            iterations=tuple(line["iteration"] for line in recent),
            context_mean=series("rollout/context/mean"),
            context_p95=series("rollout/context/p95"),
            context_max=series("rollout/context/max"),
            turns_mean=series("rollout/turns/mean"),
            running_requests_mean=series("rollout/load/running_requests_mean"),
            tool_wait_seconds=series("rollout/load/tool_wait_seconds"),
            live_tokens_max=series("rollout/load/live_tokens_max"),
            rollout_tokens_per_second=series("rollout/tokens_per_second"),
            update_tokens_per_second=series("update/tokens_per_second"),
        ),
        current=current,
    )
