"""The reference stage: log-probs of the episodes under the frozen initial policy."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.select import plan_of
from tasks.session import get_session
from tasks.stage import StageRef, resolve, run_stage


@task(name="reference")
def reference(run: str, iteration: int, plan: StageRef, rollout: StageRef) -> StageRef:
    """Score the rollout's samples with the initial model."""
    session = get_session(run)
    deployment = plan_of(session, plan)["reference"]
    played = resolve(session, rollout)

    def body() -> dict[str, Any]:
        manifests = [played.model_dump(mode="json")]
        result = session.call(deployment, "reference", "score", iteration, manifests=manifests)
        result["metrics"]["peak_bytes"] = session.peak_bytes("reference")
        return result

    return run_stage(session, iteration, "reference", [played.data_digest()], body)
