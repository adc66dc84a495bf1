"""The reward stage: one reward per episode."""

from __future__ import annotations

from typing import Any

from earl_core.experience.reward import merge_rewards
from tasks.stage import StageInputs, stage_task


@stage_task
def reward(given: StageInputs) -> dict[str, Any]:
    """Add up the rewards of each episode's turns and the scores of the reward functions."""
    controller = given.controller
    results = controller.groups.call(
        given.plan["experience"],
        "experience",
        "reward",
        given.iteration,
        stage="reward",
        manifests=given.references,
    )
    return merge_rewards(results, controller.config)
