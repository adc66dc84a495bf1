"""The rollout stage: episodes played by the engines, sealed as shards."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.control.observation import fitting, load_of, observe_stage
from earl_core.control.replicas import play_rollout
from earl_core.control.run_controller import get_session
from tasks.publish import input_weights
from tasks.select import plan_of
from tasks.stage import StageRef, run_stage


@task(name="rollout")
def rollout(run: str, iteration: int, plan: StageRef) -> StageRef:
    """Play this iteration's episodes with policy version `iteration`."""
    session = get_session(run)
    chosen = plan_of(session, plan)
    weights = input_weights(session, chosen["update"], iteration)

    def body() -> dict[str, Any]:
        with fitting(session, "rollout", iteration, chosen["rollout"]):
            result = play_rollout(session, chosen["rollout"], iteration, weights)
        metrics = {**result["metrics"], "peak_bytes": session.groups.peak_bytes("rollout")}
        metrics.update({f"load/{name}": value for name, value in result["statistics"].items()})
        if not metrics["replicas_lost"]:
            load = load_of(metrics)
            seconds = metrics["seconds"]
            observe_stage(session, "rollout", chosen["rollout"], iteration, load, seconds)
        return {
            "shards": result["shards"],
            "outputs": {"examples": result["examples"]},
            "metrics": metrics,
        }

    return run_stage(session, iteration, "rollout", [weights.data_digest()], body)
