"""The update stage: optimizer steps on the iteration's episodes, and a checkpoint when due; and the
publish step: the learner's weights into shared memory, described by a sealed manifest."""

from __future__ import annotations

import logging
from typing import Any

from prefect import task

from earl_core.algorithms.importance import too_small
from earl_core.control.learner import call_learner, ensure_learner, publish_weights
from earl_core.control.resume_point import StateLost
from earl_core.control.run_controller import RunController, controller_of
from earl_core.control.stage_execution import (
    StageWatch,
    key_of,
    surviving,
    training_load,
    weights_exist,
)
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import rows_of
from earl_core.dispatch import Manifest, ManifestError
from earl_core.run.policy_versions import MADE, carried
from earl_core.run.saved_versions import saved
from earl_core.weights.manifest import WeightsManifest
from earl_core.weights.probe import PREFIXES
from tasks.stage import StageInputs, StageRef, plan_of, run_stage, stage_task

logger = logging.getLogger(__name__)


@stage_task
def update(given: StageInputs) -> dict[str, Any]:
    """Train the newest policy version, once; that makes the next one."""
    controller, iteration, deployment = given.controller, given.iteration, given.plan["update"]
    run, learner = controller.run, controller.learners[deployment.stage]
    checkpoint = learner.checkpoint(iteration) if due(controller, iteration) else None
    load = training_load(rows_of(given.manifests))
    watch = StageWatch(controller, deployment, iteration)
    with watch.fitting(load):
        ensure_learner(controller, deployment, iteration, run.versions.before(iteration))
        if controller.config.schedule.staleness:
            # Rollouts to come play this version, too, which nobody holds after the update.
            input_weights(controller, deployment, iteration, "update")
        if not controller.hardware.gpus:
            # With GPUs whoever asks for a learner has made room already.
            controller.groups.make_room("update", deployment)
        result = call_learner(
            controller,
            deployment,
            "update",
            iteration,
            agreed=("policy_version", "digest", "steps_applied"),
            manifests=given.references,
            link_bytes=given.plan.link_bytes("update"),
            checkpoint=str(checkpoint) if checkpoint else None,
            record={
                "run": run.uid,
                "tracking": run.record.get("tracking"),
                "key": controller.verdicts[iteration, "update"].key,
            },
        )
    learner.version = int(result["policy_version"])
    learner.drop_handoff()
    run.note(iteration, "update", f"steps applied: {result['steps_applied']}")
    if warning := controller.config.mismatch_watch.warning(result["metrics"], iteration):
        logger.warning("%s", warning)
    if small := too_small(result["metrics"], controller.config.update.least_sample_size):
        logger.warning("iteration %d: %s", iteration, small)
    metrics = {**result["metrics"], "peak_bytes": controller.groups.peak_bytes("update")}
    outputs = watch.measured(metrics) if result["steps_applied"] else {}
    outputs |= {"digest": result["digest"], MADE: result["policy_version"]}
    return {
        "shards": result["shards"],
        "outputs": {**outputs, PREFIXES: result[PREFIXES]},
        "metrics": metrics,
    }


def due(controller: RunController, iteration: int) -> bool:
    """Tell whether the iteration ends with a checkpoint."""
    config = controller.config
    last = iteration + 1 >= config.iterations
    return last or controller.single_iteration or (iteration + 1) % config.checkpoint.every == 0


@task(name="publish")
def publish(run: str, iteration: int, plan: StageRef, update: StageRef) -> StageRef:
    """Publish the policy version that the iteration's update made."""
    controller = controller_of(run)
    deployment = plan_of(controller, plan).stages["update"]
    version = controller.run.versions.update(iteration).made

    def body() -> dict[str, Any]:
        with StageWatch(controller, deployment, iteration).fitting():
            weights = publish_weights(controller, deployment, iteration, version)
        return _outputs(weights)

    reference = run_stage(controller, iteration, "publish", body)
    controller.release_weights(iteration)
    return reference


def input_weights(
    controller: RunController, deployment: StageDeployment, iteration: int, reader: str = "rollout"
) -> Manifest:
    """The sealed weights that this iteration's rollout plays with, published again if lost.

    They are the publish step's of the iteration that made them, or the initial model's, published
    by the same path under the stage name `initial` of iteration 0. reader: the stage that needs a
    version: `rollout`, `evaluation`, or `update` for the one that it trains. Raises `StateLost` for
    a version that no learner holds any more and that was not saved.
    """
    versions = controller.run.versions
    version = versions.of_stage(iteration, reader)
    producer, stage = versions.publication(version)
    try:
        known = controller.run.manifest(producer, stage)
    except ManifestError:
        known = None
    if known is not None and carried(known) == version:
        if weights_exist(controller, known):
            return known
        if (lying := saved(controller.run.path, known)) is not None:
            return lying
    if version < versions.before(iteration) and controller.learners["update"].version != version:
        raise StateLost(
            f"policy version {version}, which iteration {iteration} plays, is neither in shared "
            "memory nor saved: resume the run, which repeats what is missing"
        )
    with (
        surviving(controller, iteration, stage),
        StageWatch(controller, deployment, iteration).fitting(),
    ):
        weights = publish_weights(controller, deployment, iteration, version)
    # The same key and the same bytes make the same data digest: what was rolled out with the
    # lost copy of these weights stays finished.
    key = known.key if known else key_of(controller, producer, "publish", [weights.digest])
    manifest = Manifest(
        run=controller.run.uid,
        iteration=producer,
        stage=stage,
        key=key,
        policy_version=version,
        outputs=_outputs(weights)["outputs"],
    )
    return controller.run.seal(manifest)


def _outputs(weights: WeightsManifest) -> dict[str, Any]:
    return {
        "outputs": {"weights": weights.model_dump(mode="json"), "digest": weights.digest},
        "metrics": {"bytes": float(weights.bytes)},
    }
