"""The live learner: started, resharded, restored and checked before a stage needs its version."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from earl_core.cluster.errors import WorkerCallFailed
from earl_core.cluster.rpc import same_results
from earl_core.control.learner_handle import LearnerHandle
from earl_core.control.resume_point import StateLost, saved_state
from earl_core.control.run_controller import RunController
from earl_core.control.stage_execution import StageWatch
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import ManifestError
from earl_core.run.policy_versions import INITIAL_VERSION
from earl_core.run.worker import READ_RULES
from earl_core.weights.manifest import WeightsManifest
from earl_core.weights.probe import PREFIXES

logger = logging.getLogger(__name__)


def ensure_learner(
    controller: RunController, deployment: StageDeployment, iteration: int, version: int
) -> None:
    """Have a learner, deployed so, that holds policy version `version`.

    A live one is resharded where its number of ranks stays; else its state goes
    through a checkpoint. One that holds another version, and a fresh group, load the checkpoint of
    the version needed. Raises `StateLost` when there is none: the missing iterations come first.
    """
    learner = controller.learners[deployment.stage]
    with StageWatch(controller, deployment, iteration).timing_switch():
        saved = _redeploy(controller, learner, deployment, iteration)
        controller.groups.get(learner.role, deployment)
        if learner.version is None and saved is not None:
            _restore(controller, deployment, iteration, saved)
        if learner.version != version:
            saved = saved_state(controller.run, version, learner.role)
            _restore(controller, deployment, iteration, saved)


def _restore(
    controller: RunController, deployment: StageDeployment, iteration: int, source: Path | None
) -> None:
    checkpoint = str(source) if source else None
    result = call_learner(
        controller, deployment, "restore", iteration, kept=False, checkpoint=checkpoint
    )
    controller.learners[deployment.stage].version = int(result["policy_version"])


def call_learner(
    controller: RunController,
    deployment: StageDeployment,
    method: str,
    iteration: int,
    *,
    agreed: tuple[str, ...] = ("policy_version",),
    kept: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """Run a method of the learner in all ranks together; their one result.

    agreed: what all ranks must return alike. kept: it needs the learner's state, so that a fresh
    learner is none: raises `WorkerLost` where the one that was made ready is gone.
    """
    arguments["kept"] = kept
    role = controller.learners[deployment.stage].role
    results = call_together(controller, deployment, role, method, iteration, **arguments)
    return same_results(results, agreed, READ_RULES)


def call_together(
    controller: RunController,
    deployment: StageDeployment,
    role: str,
    method: str,
    iteration: int,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Run a method in which ranks talk to each other; the results in rank order.

    When it fails in a group of several ranks the group is ended: one that left the others in the
    middle of an exchange would be answered later with what was meant for that.
    """
    try:
        return controller.groups.call(deployment, role, method, iteration, **arguments)
    except WorkerCallFailed:
        group = controller.groups.live(role)
        if group is not None and deployment.world_size > 1:
            group.stop()
        raise


def _redeploy(
    controller: RunController,
    learner: LearnerHandle,
    deployment: StageDeployment,
    iteration: int,
) -> Path | None:
    """Bring a live learner's state over to another stage deployment.

    Returns the directory that a fresh group must restore from, if its state was put into one.
    """
    group = controller.groups.live(learner.role)
    if group is None or group.deployment is None or learner.version is None:
        parked, learner.parked = learner.parked, None
        if parked is None:
            learner.drop_handoff()
        return parked
    if group.deployment == deployment._asdict():
        return None
    current = StageDeployment(**group.deployment)
    try:
        if current.world_size == deployment.world_size:
            moved = controller.groups.reshard(learner.role, deployment, iteration)
            controller.run.note(
                iteration, deployment.stage, f"resharded in {moved['seconds']:.2f} s"
            )
            return None
        return save_state(controller, learner, current, iteration)
    except WorkerCallFailed:
        # Its state is no use any more; the last checkpoint's may be as new.
        logger.warning("the live learner could not be resharded: a new one is built", exc_info=True)
        return None


def save_state(
    controller: RunController, learner: LearnerHandle, deployment: StageDeployment, iteration: int
) -> Path | None:
    """Return the folder of the state that the live learner, deployed so, holds; saved there unless
    a checkpoint has it."""
    assert learner.version is not None
    with suppress(StateLost):
        return saved_state(controller.run, learner.version, learner.role)
    learner.drop_handoff()
    call_learner(controller, deployment, "save", iteration, directory=str(learner.handoff))
    return learner.handoff


def publish_weights(
    controller: RunController, deployment: StageDeployment, iteration: int, version: int
) -> WeightsManifest:
    """Have the learner write policy version `version` into shared memory, with its probe."""
    ensure_learner(controller, deployment, iteration, version)
    result = call_learner(
        controller,
        deployment,
        "publish",
        iteration,
        agreed=("digest",),
        directory=str(controller.run.store.directory),
        policy_version=version,
        dtype=controller.config.rollout.dtype,
        prefixes=_prefixes(controller, version),
    )
    return WeightsManifest.model_validate(result)


def _prefixes(controller: RunController, version: int) -> list[dict[str, Any]]:
    """Return the beginnings of rows that the version's update drew for its probe."""
    maker = None if version == INITIAL_VERSION else controller.run.versions.maker(version)
    if maker is None:
        return []
    try:
        # Updates of older releases drew none.
        return list(controller.run.manifest(maker, "update").outputs.get(PREFIXES, ()))
    except ManifestError:
        return []
