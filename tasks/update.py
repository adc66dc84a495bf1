"""The update stage: optimizer steps on the iteration's episodes, and a checkpoint when due."""

from __future__ import annotations

import logging
from typing import Any

from prefect import task

from earl_core.control.finished_stages import key_of
from earl_core.control.learner import call_learner, drop_handoff, ensure_learner
from earl_core.control.observation import fitting, load_of, observe_stage
from earl_core.control.run_controller import Session, get_session
from tasks.select import plan_of
from tasks.stage import StageRef, resolve, run_stage

logger = logging.getLogger(__name__)


@task(name="update")
def update(
    run: str,
    iteration: int,
    plan: StageRef,
    rollout: StageRef,
    advantage: StageRef,
    reference: StageRef | None = None,
) -> StageRef:
    """Make policy version `iteration + 1` out of version `iteration`, once."""
    session = get_session(run)
    deployment = plan_of(session, plan)["update"]
    given = [rollout, *([reference] if reference else []), advantage]
    inputs = [resolve(session, stage) for stage in given]
    digests = [manifest.data_digest() for manifest in inputs]
    record = {
        "run": session.run.uid,
        "tracking": session.run.record.get("tracking"),
        "key": key_of(session, iteration, "update", digests),
    }

    def body() -> dict[str, Any]:
        checkpoint = session.run.checkpoint_path(iteration) if due(session, iteration) else None
        load = load_of(inputs[0].metrics)
        with fitting(session, "update", iteration, deployment, load):
            ensure_learner(session, deployment, iteration, version=iteration)
            result = call_learner(
                session,
                deployment,
                "update",
                iteration,
                agreed=("policy_version", "digest", "steps_applied"),
                manifests=[manifest.model_dump(mode="json") for manifest in inputs],
                checkpoint=str(checkpoint.resolve()) if checkpoint else None,
                record=record,
            )
        session.live_version = int(result["policy_version"])
        drop_handoff(session)
        session.run.note(iteration, "update", f"steps applied: {result['steps_applied']}")
        warning = session.config.mismatch_watch.warning(result["metrics"], iteration)
        if warning:
            logger.warning("%s", warning)
        metrics = {**result["metrics"], "peak_bytes": session.groups.peak_bytes("update")}
        if result["steps_applied"]:
            peak, seconds = metrics.get("peak_cuda_bytes", 0.0), metrics["seconds"]
            observe_stage(session, "update", deployment, iteration, load, seconds, peak)
        return {
            "shards": result["shards"],
            "outputs": {"digest": result["digest"]},
            "metrics": metrics,
        }

    return run_stage(session, iteration, "update", digests, body)


def due(session: Session, iteration: int) -> bool:
    """Whether the iteration ends with a checkpoint."""
    config = session.config
    last = iteration + 1 >= config.iterations
    return last or session.single_iteration or (iteration + 1) % config.checkpoint.every == 0
