"""The rollout stage: episodes played by the engines, sealed as shards."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.control.observation import fitting, load_of, observe_stage
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
        with fitting(controller, "rollout", iteration, chosen["rollout"]):
            result = play_rollout(controller, chosen["rollout"], iteration, weights)
        metrics = {**result["metrics"], "peak_bytes": controller.groups.peak_bytes("rollout")}
        metrics.update({f"load/{name}": value for name, value in result["statistics"].items()})
        if not metrics["replicas_lost"]:
            load = load_of(metrics)
            seconds = metrics["seconds"]
            observe_stage(controller, "rollout", chosen["rollout"], iteration, load, seconds)
        return {
            "shards": result["shards"],
            "outputs": {"examples": result["examples"]},
            "metrics": metrics,
        }

    return run_stage(controller, iteration, "rollout", body)
