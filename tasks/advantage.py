"""The advantage stage: per-token advantages from the episodes' rewards."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.cluster.results import merge_results
from earl_core.config import RunConfig
from earl_core.control.run_controller import controller_of
from earl_core.dispatch import Manifest
from earl_core.experience.advantage import ADVANTAGE_RULES
from earl_core.experience.statistics import merge_statistics
from earl_core.trajectory.schema import SAMPLE_BITS
from tasks.select import plan_of
from tasks.stage import StageRef, resolve, run_stage


@task(name="advantage")
def advantage(
    run: str,
    iteration: int,
    plan: StageRef,
    rollout: StageRef,
    reward: StageRef,
    reference: StageRef | None = None,
) -> StageRef:
    """Compare episodes; with KL in the reward, charge each token for leaving the reference."""
    controller = controller_of(run)
    deployment = plan_of(controller, plan)["experience"]
    given = [rollout, reward, *([reference] if reference else [])]
    inputs = [resolve(controller, stage) for stage in given]

    def in_every_rank(method: str, **arguments: Any) -> list[dict[str, Any]]:
        manifests = [manifest.model_dump(mode="json") for manifest in inputs]
        return controller.groups.call_all(
            deployment,
            "experience",
            method,
            iteration,
            stage="advantage",
            manifests=manifests,
            **arguments,
        )

    def body() -> dict[str, Any]:
        statistics = merge_statistics(in_every_rank("advantage_statistics"))
        result = merge_results(in_every_rank("advantage", statistics=statistics), ADVANTAGE_RULES)
        metrics = with_failures(result["metrics"], inputs[0], controller.config)
        return {**result, "metrics": metrics}

    return run_stage(controller, iteration, "advantage", body)


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
