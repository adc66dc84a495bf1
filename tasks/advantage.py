"""The advantage stage: per-token advantages from the episodes' rewards."""

from __future__ import annotations

from typing import Any

from prefect import task

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

    def body() -> dict[str, Any]:
        manifests = [manifest.model_dump(mode="json") for manifest in inputs]
        return session.call(
            deployment, "experience", "advantage", iteration, stage="advantage", manifests=manifests
        )

    digests = [manifest.data_digest() for manifest in inputs]
    return run_stage(session, iteration, "advantage", digests, body)
