"""What a run says while it goes on: layouts that switch, stages that are repeated.

Each is one line: an event for the display (`switched` or `repeated`) and a line of the Prefect
run's log.
"""

from __future__ import annotations

import logging

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from earl_core.control.run_controller import Session
from earl_core.selector import DeploymentPlan
from earl_core.selector.choice.changes import layout_changes, misfit_text
from earl_core.selector.profile.observations import Observation


def announce_plan(session: Session, before: DeploymentPlan | None, plan: DeploymentPlan) -> None:
    """Say which stages are laid out otherwise than in `before`: the iteration's earlier attempt,
    else the last iteration's plan."""
    for change in layout_changes(before, plan):
        _say(session, change.stage, plan.iteration, {"switched": change.text}, change.text)


def announce_misfit(session: Session, seen: Observation) -> None:
    """Say that a stage did not fit and is repeated under what is chosen next."""
    text = misfit_text(seen)
    _say(session, seen.stage, seen.iteration, {"repeated": text}, text)


def announce_loss(session: Session, iteration: int, stage: str, text: str) -> None:
    """Say that a stage lost ranks and is repeated."""
    _say(session, stage, iteration, {"repeated": text}, text)


def _say(session: Session, stage: str, iteration: int, event: dict[str, str], text: str) -> None:
    session.listener(stage, iteration, dict(event))
    try:
        get_run_logger().info("%s", text)
    except MissingContextError:
        logging.getLogger(__name__).info("%s", text)
