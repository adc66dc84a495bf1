"""The rollout stage: the episodes of an iteration."""

from __future__ import annotations

import logging
from typing import Any

from earl_core.control.prompt_waves import few_differ, wave_after, whole_iteration, whole_rollout
from earl_core.control.replicas import play_rollout
from earl_core.control.stage_execution import StageWatch
from earl_core.secrets import redact_tree
from tasks.publish import input_weights
from tasks.stage import StageInputs, stage_task

logger = logging.getLogger(__name__)


@stage_task
def rollout(given: StageInputs) -> dict[str, Any]:
    """Play this iteration's episodes, or a wave of them; or put its waves together."""
    controller, iteration, plan = given.controller, given.iteration, given.plan
    sealed = list(given.manifests.values())
    if controller.config.rollout.filters_groups and not given.wave:
        result = whole_rollout(controller.config, sealed)
        if few := few_differ(result["metrics"], iteration):
            logger.warning("%s", few)
            controller.run.note(iteration, "rollout", few)
        return result
    weights = input_weights(controller, plan["update"], iteration)
    wave = (
        wave_after(controller.run, iteration, sealed)
        if given.wave
        else whole_iteration(controller.run, iteration)
    )
    watch = StageWatch(controller, plan["rollout"], iteration)
    with watch.fitting():
        result = play_rollout(controller, plan["rollout"], iteration, weights, given.name, wave)
    if text := controller.config.mismatch_watch.warning(result["metrics"], iteration):
        logger.warning("%s", text)
    metrics = {**result["metrics"], "peak_bytes": controller.groups.peak_bytes("rollout")}
    metrics.update({f"load/{name}": value for name, value in result["statistics"].items()})
    outputs = {} if metrics["replicas_lost"] else watch.measured(metrics)
    outputs |= result["outputs"]
    if given.wave:
        outputs["tally"] = redact_tree(result["tally"].model_dump(mode="json"))
    if result["tally"].failures:
        # How often episodes failed, by reason: they are in no shard.
        outputs["failures"] = redact_tree(result["tally"].failures)
    return {"shards": result["shards"], "outputs": outputs, "metrics": metrics}
