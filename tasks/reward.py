"""The reward stage: one reward per episode."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.cluster.results import merge_results
from earl_core.control.run_controller import controller_of
from earl_core.experience.reward import REWARD_RULES
from tasks.select import plan_of
from tasks.stage import StageRef, resolve, run_stage


@task(name="reward")
def reward(run: str, iteration: int, plan: StageRef, rollout: StageRef) -> StageRef:
    """Add up the rewards of each episode's turns."""
    controller = controller_of(run)
    deployment = plan_of(controller, plan)["experience"]
    played = resolve(controller, rollout)

    def body() -> dict[str, Any]:
        manifests = [played.model_dump(mode="json")]
        results = controller.groups.call_all(
            deployment, "experience", "reward", iteration, stage="reward", manifests=manifests
        )
        return merge_results(results, REWARD_RULES)

    return run_stage(controller, iteration, "reward", body)
