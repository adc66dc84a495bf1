"""The reward stage: one reward for each episode."""

from __future__ import annotations

from typing import Any

from earl_core.control.prompt_waves import divided, rank_results, whole_reward
from earl_core.deployment.stages import in_wave, rows_of
from earl_core.experience.reward import merge_rewards
from earl_core.secrets import redact_tree
from tasks.stage import StageInputs, reference_to, stage_task


@stage_task
def reward(given: StageInputs) -> dict[str, Any]:
    """Add up the rewards of each episode's turns and the scores of the reward functions, or put
    those of an iteration's waves together."""
    controller, config = given.controller, given.controller.config
    rollouts, rewards = divided(list(given.manifests.values()))
    if config.rollout.filters_groups and not given.wave:
        return whole_reward(config, rewards)
    wave = in_wave("rollout", given.wave)
    played = given.manifests[wave] if given.wave else rows_of(given.manifests)
    results = controller.groups.call(
        given.plan["experience"],
        "experience",
        "reward",
        given.iteration,
        stage=given.name,
        manifests=[reference_to(controller, played)],
        shards_of=given.name,
        before=round(sum(each.metrics["episodes"] for each in rollouts if each is not played)),
    )
    merged = merge_rewards(results, config, rank_results(rewards))
    if given.wave:
        ranks = [{name: each[name] for name in each if name != "shards"} for each in results]
        merged["outputs"] = {"ranks": redact_tree(ranks)}
    return merged
