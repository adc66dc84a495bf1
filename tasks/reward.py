"""The reward stage: one reward for each episode."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from earl_core.control.guard_probe import probed_functions
from earl_core.control.guarding import bounds_of
from earl_core.control.prompt_waves import divided, rank_results, whole_reward
from earl_core.control.run_controller import RunController
from earl_core.control.stage_execution import key_of
from earl_core.deployment.stages import in_wave, rows_of
from earl_core.dispatch import Manifest, ManifestError
from earl_core.experience.reward import merge_rewards
from earl_core.run.replay import replayed_groups
from earl_core.secrets import redact_tree
from tasks.stage import StageInputs, StageRef, reference_to, stage_task


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
        scored=_scored_before(controller, played),
        bounds=bounds_of(controller, given.iteration),
        probe=probed_functions(controller, given.iteration) if given.wave < 2 else {},
    )
    merged = merge_rewards(results, config, rank_results(rewards))
    if given.wave:
        ranks = [{name: each[name] for name in each if name != "shards"} for each in results]
        merged["outputs"] = {"ranks": redact_tree(ranks)}
    return merged


def _scored_before(controller: RunController, played: Manifest) -> list[StageRef]:
    """References to the rewards of the iterations whose groups are trained again, as far as
    functions gave scores there, which are those of now."""
    run, config = controller.run, controller.config
    if not config.reward.functions:
        return []
    size, found = config.rollout.prompts_per_iteration, []
    for iteration in sorted({group // size for group in replayed_groups(played)}):
        with suppress(ManifestError):
            collected = run.manifest(iteration, "collect").data_digest()
            key = key_of(controller, iteration, "reward", [collected])
            if (sealed := run.sealed(iteration, "reward", key)) is not None:
                found.append(reference_to(controller, sealed))
    return found
