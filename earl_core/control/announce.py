"""What a run says while it goes on: stage deployments that switch, stages that are repeated.

Each is one line, an event for the listener: `switched` or `repeated`.
"""

from __future__ import annotations

from earl_core.control.run_controller import RunController
from earl_core.selector import DeploymentPlan
from earl_core.selector.choice.changes import infeasible_text, stage_changes
from earl_core.selector.profile.observations import Observation


def announce_plan(
    controller: RunController, before: DeploymentPlan | None, plan: DeploymentPlan
) -> None:
    """Say which stages are deployed otherwise than in `before`: the iteration's earlier attempt,
    else the last iteration's plan."""
    for change in stage_changes(before, plan):
        controller.listener(change.stage, plan.iteration, {"switched": change.text})


def announce_infeasible(controller: RunController, seen: Observation) -> None:
    """Say that a stage was infeasible and is repeated under what is chosen next."""
    controller.listener(seen.stage, seen.iteration, {"repeated": infeasible_text(seen)})


def announce_loss(controller: RunController, iteration: int, stage: str, text: str) -> None:
    """Say that a stage lost ranks and is repeated."""
    controller.listener(stage, iteration, {"repeated": text})
