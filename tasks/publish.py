"""The publish step: the learner's weights into shared memory, described by a sealed manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from earl_core.control.learner import publish_weights
from earl_core.control.run_controller import RunController, controller_of
from earl_core.control.stage_execution import StageWatch, key_of, surviving, weights_exist
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest, ManifestError
from earl_core.weights.manifest import WeightsManifest
from tasks.stage import StageRef, plan_of, resolve, run_stage


@task(name="publish")
def publish(run: str, iteration: int, plan: StageRef, update: StageRef) -> StageRef:
    """Publish policy version `iteration + 1`, the one that the next iteration's rollout loads."""
    controller = controller_of(run)
    deployment = plan_of(controller, plan).stages["update"]

    def body() -> dict[str, Any]:
        with StageWatch(controller, deployment, iteration).fitting():
            weights = publish_weights(controller, deployment, iteration, iteration + 1)
        return _outputs(weights)

    reference = run_stage(controller, iteration, "publish", body)
    _drop_older(controller, resolve(controller, reference))
    return reference


def input_weights(
    controller: RunController, deployment: StageDeployment, iteration: int
) -> Manifest:
    """The sealed weights that this iteration's rollout plays with, published again if lost.

    They are the previous iteration's publish step's, or the initial model's, published by the
    same path under the stage name `initial` of iteration 0.
    """
    producer, stage = (iteration - 1, "publish") if iteration > 0 else (0, "initial")
    try:
        known = controller.run.manifest(producer, stage)
    except ManifestError:
        known = None
    if known is not None and weights_exist(controller, known):
        return known
    with (
        surviving(controller, iteration, stage),
        StageWatch(controller, deployment, iteration).fitting(),
    ):
        weights = publish_weights(controller, deployment, iteration, iteration)
    # The same key and the same bytes make the same data digest: what was rolled out with the
    # lost copy of these weights stays finished.
    key = known.key if known else key_of(controller, producer, "publish", [weights.digest])
    manifest = Manifest(
        run=controller.run.uid,
        iteration=producer,
        stage=stage,
        key=key,
        policy_version=iteration,
        outputs=_outputs(weights)["outputs"],
    )
    return controller.run.seal(manifest)


def _outputs(weights: WeightsManifest) -> dict[str, Any]:
    return {
        "outputs": {"weights": weights.model_dump(mode="json"), "digest": weights.digest},
        "metrics": {"bytes": float(weights.bytes)},
    }


def _drop_older(controller: RunController, manifest: Manifest) -> None:
    """Weights of older versions are needed by nobody once a newer one is sealed."""
    weights = WeightsManifest.model_validate(manifest.outputs["weights"])
    current = {Path(file.path).name for file in weights.files}
    controller.run.stores.release_others("*.safetensors", current)
