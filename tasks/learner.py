"""The live learner: started, restored and checked before a stage relies on its version."""

from __future__ import annotations

from typing import Any

from earl_core.selector import StageDeployment
from earl_core.weights.manifest import WeightsManifest
from tasks.session import Session, StateLost


def ensure_learner(session: Session, deployment: StageDeployment, iteration: int) -> None:
    """Have a learner that holds the state iteration `iteration` starts from, or ended with.

    A fresh group loads the last STABLE checkpoint, or the initial model when there is none.
    Raises `StateLost` when that is not the version needed: the missing iterations come first.
    """
    session.group("update", deployment)
    if session.live_version is None:
        last = max(session.run.last_stable(), sealed_checkpoint(session, iteration))
        path = str(session.run.checkpoint_path(last).resolve()) if last >= 0 else None
        result = session.call(deployment, "update", "restore", iteration, checkpoint=path)
        session.live_version = int(result["policy_version"])
    if session.live_version not in (iteration, iteration + 1):
        raise StateLost(
            f"iteration {iteration} starts from policy version {iteration}, but the learner holds "
            f"version {session.live_version}: resume the run, which repeats what is missing"
        )


def sealed_checkpoint(session: Session, iteration: int) -> int:
    """`iteration` if its update was sealed with a checkpoint that is not STABLE yet, else -1."""
    sealed = session.run.stage_path(iteration, "update").is_file()
    whole = (session.run.checkpoint_path(iteration) / "state.json").is_file()
    return iteration if sealed and whole else -1


def publish_weights(
    session: Session, deployment: StageDeployment, iteration: int, version: int
) -> WeightsManifest:
    """Have the learner write policy version `version` into shared memory."""
    ensure_learner(session, deployment, iteration)
    result: dict[str, Any] = session.call(
        deployment,
        "update",
        "publish",
        iteration,
        directory=str(session.run.store.directory),
        policy_version=version,
        dtype=session.config.rollout.dtype,
    )
    return WeightsManifest.model_validate(result)
