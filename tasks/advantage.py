"""The advantage stage: per-token advantages from the episodes' rewards."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.cluster.results import merge_results
from earl_core.experience.advantage import ADVANTAGE_RULES
from earl_core.experience.statistics import merge_statistics
from tasks.select import plan_of
from tasks.session import get_session
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
    session = get_session(run)
    deployment = plan_of(session, plan)["experience"]
    given = [rollout, reward, *([reference] if reference else [])]
    inputs = [resolve(session, stage) for stage in given]

    def in_every_rank(method: str, **arguments: Any) -> list[dict[str, Any]]:
        manifests = [manifest.model_dump(mode="json") for manifest in inputs]
        return session.call_all(
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
        return merge_results(in_every_rank("advantage", statistics=statistics), ADVANTAGE_RULES)

    digests = [manifest.data_digest() for manifest in inputs]
    return run_stage(session, iteration, "advantage", digests, body)
