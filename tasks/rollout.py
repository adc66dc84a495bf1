"""The rollout stage: episodes played by the engines, sealed as shards."""

from __future__ import annotations

from typing import Any

from earl_core.control.replicas import play_rollout
from earl_core.control.stage_execution import StageWatch
from earl_core.secrets import redact_tree
from tasks.publish import input_weights
from tasks.stage import StageInputs, stage_task


@stage_task
def rollout(given: StageInputs) -> dict[str, Any]:
    """Play this iteration's episodes."""
    controller, iteration, plan = given.controller, given.iteration, given.plan
    weights = input_weights(controller, plan["update"], iteration)
    watch = StageWatch(controller, plan["rollout"], iteration)
    with watch.fitting():
        result = play_rollout(controller, plan["rollout"], iteration, weights)
    metrics = {**result["metrics"], "peak_bytes": controller.groups.peak_bytes("rollout")}
    metrics.update({f"load/{name}": value for name, value in result["statistics"].items()})
    outputs = {} if metrics["replicas_lost"] else watch.measured(metrics)
    outputs["cursor"] = result["cursor"]
    if result["failures"]:
        # How often episodes failed, by reason: they are in no shard.
        outputs["failures"] = redact_tree(result["failures"])
    return {"shards": result["shards"], "outputs": outputs, "metrics": metrics}
