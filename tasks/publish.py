"""The publish step: the learner's weights into shared memory, described by a sealed manifest."""

from __future__ import annotations

import logging
from typing import Any

from prefect import task

from earl_core.control.learner import publish_weights
from earl_core.control.resume_point import StateLost
from earl_core.control.run_controller import RunController, controller_of
from earl_core.control.stage_execution import StageWatch, key_of, surviving, weights_exist
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest, ManifestError
from earl_core.run.policy_versions import carried
from earl_core.run.saved_versions import saved
from earl_core.weights.manifest import WeightsManifest
from tasks.stage import StageRef, plan_of, run_stage

logger = logging.getLogger(__name__)


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
