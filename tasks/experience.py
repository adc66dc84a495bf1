"""The stages between rollout and update: one reward per episode, log-probs under the frozen initial
policy, per-token advantages."""

from __future__ import annotations

from typing import Any

from earl_core.algorithms.moments import merge_statistics
from earl_core.cluster.rpc import Rule, merge_results
from earl_core.control.learner import call_together, ensure_learner
from earl_core.control.prompt_waves import divided, rank_results, whole_reward
from earl_core.control.stage_execution import StageWatch, training_load, without_step
from earl_core.deployment.stages import STAGES, in_wave
from earl_core.experience.advantage import ADVANTAGE_RULES
from earl_core.experience.reward import merge_rewards
from earl_core.run.worker import READ_RULES
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
    played = given.manifests[in_wave("rollout", given.wave)]
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


_RULES: dict[str, Rule] = {
    "seconds": "max",
    "tokens_per_second": "sum",
    "peak_rss_bytes": "max",
    "peak_cuda_bytes": "max",
    "other_cuda_bytes": "max",
    **READ_RULES,
}


@stage_task
def reference(given: StageInputs) -> dict[str, Any]:
    """Score the rollout's samples with the initial model: a group's own, or the base of the adapter
    that the update's ranks train."""
    controller, iteration = given.controller, given.iteration
    role = STAGES["reference"].done_by(controller.config)
    deployment = given.plan[role]
    # What is seen of the stage is its own, whoever does it.
    watch = StageWatch(controller, deployment._replace(stage="reference"), iteration)
    with watch.fitting(training_load(given.manifests["rollout"])):
        if role in controller.learners:
            version = controller.run.versions.before(iteration)
            ensure_learner(controller, deployment, iteration, version)
        else:
            with watch.timing_switch():
                controller.groups.get(role, deployment)
        results = call_together(
            controller,
            deployment,
            role,
            "score_reference",
            iteration,
            stage="reference",
            kept=role in controller.learners,
            manifests=given.references,
            link_bytes=given.plan.link_bytes(role),
        )
    result = merge_results(results, _RULES)
    metrics = result["metrics"]
    metrics["peak_bytes"] = controller.groups.peak_bytes(role)
    # Without a row nothing was measured.
    return {**result, "outputs": watch.measured(metrics) if result["shards"] else {}}


@stage_task
def advantage(given: StageInputs) -> dict[str, Any]:
    """Compare episodes; with KL in the reward, charge each token for leaving the reference."""
    controller = given.controller

    def in_every_rank(method: str, **arguments: Any) -> list[dict[str, Any]]:
        return controller.groups.call(
            given.plan["experience"],
            "experience",
            method,
            given.iteration,
            stage="advantage",
            manifests=given.references,
            **arguments,
        )

    statistics = merge_statistics(in_every_rank("advantage_statistics"))
    played = given.manifests["rollout"].metrics
    alike = played.get("groups_alike", 0.0)
    if not statistics["episodes"]:
        without_step(controller, given.iteration, alike=alike > 0)
    result = merge_results(in_every_rank("advantage", statistics=statistics), ADVANTAGE_RULES)
    failed = sum(
        given.manifests[stage].metrics.get("episodes_failed", 0.0)
        for stage in ("rollout", "reward")
    )
    prompts, groups = controller.config.rollout.prompts_per_iteration, statistics["groups"]
    if "waves" in played:
        # Groups that two episodes have rewards of were judged, whether they are trained on or not.
        prompts, groups = played["prompts"], played["groups_different"] + alike
    metrics = with_failures(result["metrics"], failed, prompts, groups)
    return {**result, "metrics": metrics}


def with_failures(
    metrics: dict[str, float], failed: float, prompts: float, groups: float | None
) -> dict[str, float]:
    """The advantage stage's metrics, with the failed episodes, which no rank sees.

    Episodes that failed in the rollout leave before its shards are written, episodes that could not
    be scored before rewards are. groups: with an episode that has a reward; where groups are
    compared, those that failed wholly are added to `groups_dropped`.
    """
    counted = {**metrics, "episodes_failed": failed}
    if groups is not None:
        counted["groups_dropped"] = metrics.get("groups_dropped", 0.0) + prompts - groups
    return counted
