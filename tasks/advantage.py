"""The advantage stage: an advantage for each token."""

from __future__ import annotations

from typing import Any

from earl_core.algorithms.moments import merge_statistics
from earl_core.cluster.rpc import merge_results
from earl_core.control.guarding import diagnose
from earl_core.control.stage_execution import without_step
from earl_core.deployment.stages import rows_of
from earl_core.experience.advantage import ADVANTAGE_RULES
from earl_core.guard.caution import KL_FACTOR
from earl_core.guard.decision import GUARD
from earl_core.run.replay import replayed_groups
from tasks.stage import StageInputs, stage_task


@stage_task
def advantage(given: StageInputs) -> dict[str, Any]:
    """Compare episodes; with KL in the reward, charge each token for leaving the reference."""
    controller = given.controller
    decision = diagnose(controller, given.iteration, given.manifests)
    charged = controller.config.algorithm.kl.placement == "reward"
    kl_factor = KL_FACTOR**decision.caution if charged else 1.0

    def in_every_rank(method: str, **arguments: Any) -> list[dict[str, Any]]:
        return controller.groups.call(
            given.plan["experience"],
            "experience",
            method,
            given.iteration,
            stage="advantage",
            manifests=given.references,
            quarantined=list(decision.quarantined),
            kl_factor=kl_factor,
            **arguments,
        )

    statistics = merge_statistics(in_every_rank("advantage_statistics"))
    played = rows_of(given.manifests).metrics
    alike = played.get("groups_alike", 0.0)
    if not statistics["episodes"]:
        without_step(controller, given.iteration, alike=alike > 0)
    result = merge_results(in_every_rank("advantage", statistics=statistics), ADVANTAGE_RULES)
    failed = sum(
        metrics.get("episodes_failed", 0.0)
        for metrics in (played, given.manifests["reward"].metrics)
    )
    again = len(replayed_groups(rows_of(given.manifests)))
    prompts: float = controller.config.rollout.prompts_per_iteration + again
    groups = statistics["groups"]
    if "waves" in played:
        # Groups that two episodes have rewards of were judged, whether they are trained on or not.
        prompts, groups = played["prompts"], played["groups_different"] + alike
    metrics = with_failures(result["metrics"], failed, prompts, groups)
    guard = {} if controller.config.guard == "off" else {GUARD: decision.model_dump(mode="json")}
    return {**result, "metrics": metrics, "outputs": guard}


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
