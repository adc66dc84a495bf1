"""The collect stage: the episodes of an iteration, of groups that engines play as a stream."""

from __future__ import annotations

import logging
from typing import Any

from earl_core.control.stage_execution import StageWatch
from tasks.publish import input_weights
from tasks.stage import StageInputs, stage_task

logger = logging.getLogger(__name__)


@stage_task
def collect(given: StageInputs) -> dict[str, Any]:
    """Wait for this iteration's groups, and name their rows."""
    controller, iteration, plan = given.controller, given.iteration, given.plan
    weights = input_weights(controller, plan["update"], iteration)
    watch = StageWatch(controller, plan["rollout"], iteration)
    with watch.fitting():
        result = controller.stream.collect(
            plan["rollout"], iteration, weights, alone=controller.single_iteration
        )
    if text := controller.config.mismatch_watch.warning(result["metrics"], iteration):
        logger.warning("%s", text)
    if not result["metrics"]["replicas_lost"]:
        result["outputs"] |= watch.measured(result["metrics"])
    # The weights before these, which engines might have loaded until now.
    controller.release_weights(iteration - 1)
    return result
