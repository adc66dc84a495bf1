"""The rollout stage: episodes played by the engines, sealed as shards."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.control.observation import StageWatch, load_of
from earl_core.control.replicas import play_rollout
from earl_core.control.run_controller import controller_of
from tasks.publish import input_weights
from tasks.select import plan_of
from tasks.stage import StageRef, run_stage


@task(name="rollout")
def rollout(run: str, iteration: int, plan: StageRef) -> StageRef:
    """Play this iteration's episodes with policy version `iteration`."""
    controller = controller_of(run)
    chosen = plan_of(controller, plan)
    weights = input_weights(controller, chosen["update"], iteration)

    def body() -> dict[str, Any]:
        watch = StageWatch(controller, chosen["rollout"], iteration)
        with watch.fitting():
            result = play_rollout(controller, chosen["rollout"], iteration, weights)
        metrics = {**result["metrics"], "peak_bytes": controller.groups.peak_bytes("rollout")}
        metrics.update({f"load/{name}": value for name, value in result["statistics"].items()})
        if not metrics["replicas_lost"]:
            watch.measured(load_of(metrics), metrics["seconds"])
        return {"shards": result["shards"], "metrics": metrics}

    return run_stage(controller, iteration, "rollout", body)
