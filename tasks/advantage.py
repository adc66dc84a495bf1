"""The advantage stage: per-token advantages from the episodes' rewards."""

from __future__ import annotations

from typing import Any

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.cluster.rpc import merge_results
from earl_core.config import RunConfig
from earl_core.dispatch import Manifest
from earl_core.experience.advantage import ADVANTAGE_RULES, merge_statistics
from earl_core.trajectory.schema import SAMPLE_BITS
from tasks.stage import StageInputs, stage_task


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
            manifests=given.sent("rollout", "reward", "reference"),
            **arguments,
        )

    statistics = merge_statistics(in_every_rank("advantage_statistics"))
    result = merge_results(in_every_rank("advantage", statistics=statistics), ADVANTAGE_RULES)
    rollout = given.manifests["rollout"]
    return {**result, "metrics": with_failures(result["metrics"], rollout, controller.config)}


def with_failures(
    metrics: dict[str, float], rollout: Manifest, config: RunConfig
) -> dict[str, float]:
    """The advantage stage's metrics, with the failed episodes, which no rank sees.

    They leave the rollout before its shards are written: `episodes_failed` is the rollout's count,
    and where groups are compared, groups that failed wholly are added to `groups_dropped`.
    """
    counted = {**metrics, "episodes_failed": rollout.metrics.get("episodes_failed", 0.0)}
    if ADVANTAGE_ESTIMATORS.build(config.algorithm.advantage).needs_groups:
        size = config.rollout.group_size
        rows = (sample for entry in rollout.shards for sample in entry.row_ids)
        groups = {(sample >> SAMPLE_BITS) // size for sample in rows}
        lost = config.rollout.prompts_per_iteration - len(groups)
        counted["groups_dropped"] = metrics.get("groups_dropped", 0.0) + lost
    return counted
