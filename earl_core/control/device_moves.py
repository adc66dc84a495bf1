"""Devices that change sides between rollout and training: worker groups follow the plan's division
of them."""

from __future__ import annotations

import logging
from pathlib import Path

from earl_core.cluster.errors import WorkerError
from earl_core.control.learner import save_state
from earl_core.control.run_controller import RunController
from earl_core.deployment.placement import Division
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment

logger = logging.getLogger(__name__)


def division_of(controller: RunController, plan: DeploymentPlan) -> Division:
    """The division of the devices under a plan."""
    return plan.division or controller.config.stages.division


def needs_barrier(controller: RunController, plan: DeploymentPlan) -> bool:
    """Tell whether the plan's iteration may begin to play only once the one before has ended:
    because rollout and update take turns, or because devices change sides."""
    own, before = division_of(controller, plan), controller.run.plan(plan.iteration - 1)
    moves = before is not None and division_of(controller, before) != own
    return moves or not own.placed.side_by_side


def follow(controller: RunController, plan: DeploymentPlan) -> None:
    """Have worker groups follow the plan's division; where it is another one, those that have a
    place end first, and what learners hold goes to those that are built next.

    Nothing of an earlier plan may work then. The plan of an earlier iteration, as of a version that
    is evaluated late, moves nothing.
    """
    if controller.followed is not None and controller.followed.iteration > plan.iteration:
        return
    division = division_of(controller, plan)
    if division != controller.groups.division:
        before = controller.groups.division
        for learner in controller.learners.values():
            learner.parked = _parked(controller, learner.role, plan.iteration) or learner.parked
        controller.groups.move(division)
        if controller.followed is not None:
            _note(controller, plan, before, division)
    controller.followed = plan


def forget(controller: RunController) -> None:
    """Have a run that goes back to its last checkpoint follow earlier plans again, and take over
    nothing that was saved for a move since."""
    controller.followed = None
    for learner in controller.learners.values():
        learner.parked = None


def may_divide_anew(controller: RunController) -> bool:
    """Have the next choice be free to divide the devices anew, where the last one was bound to the
    running division and found nothing; false: it was not.

    No rollout of an iteration to come may play any more; groups of a stream rest.
    """
    if controller.followed is None or not controller.config.divides:
        return False
    controller.stream.rest()
    controller.followed = None
    return True


def engines_of(controller: RunController, plan: DeploymentPlan) -> StageDeployment:
    """Return the engines that play for the plan: of a version that is evaluated late those that
    there are, where devices have changed sides since."""
    newer = controller.followed
    if newer is None or newer.iteration <= plan.iteration:
        return plan["rollout"]
    if division_of(controller, plan) == controller.groups.division:
        return plan["rollout"]
    return newer["rollout"]


def _parked(controller: RunController, role: str, iteration: int) -> Path | None:
    """Save what the role's live learner holds, if nothing has yet; where it is."""
    group = controller.groups.live(role)
    learner = controller.learners[role]
    if group is None or group.deployment is None or learner.version is None:
        return None
    try:
        return save_state(controller, learner, StageDeployment(**group.deployment), iteration)
    except WorkerError:
        # Its ranks may be dead, too. The last checkpoint's may be as new.
        logger.warning("the live learner could not be saved: a new one is built", exc_info=True)
        return None


def _note(
    controller: RunController, plan: DeploymentPlan, before: Division, after: Division
) -> None:
    text = f"devices change sides: {_words(before)} -> {_words(after)}"
    controller.run.note(plan.iteration, "select", text)
    controller.listener("rollout", plan.iteration, {"switched": text})


def _words(division: Division) -> str:
    engines = division.engine_devices
    return division.placement + (f" ({engines} for the rollout)" if engines else "")
