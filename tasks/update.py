"""The update stage: optimizer steps on the iteration's episodes, and a checkpoint when due."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from earl_core.algorithms.importance import too_small
from earl_core.control.learner import call_learner, ensure_learner
from earl_core.control.prompt_waves import taken_before
from earl_core.control.run_controller import RunController
from earl_core.control.stage_execution import (
    StageWatch,
    training_load,
)
from earl_core.deployment.stages import rows_of, taking_part
from earl_core.guard.caution import KL_FACTOR, RATE_FACTOR, caution_in, caution_text
from earl_core.run.checkpoints import BESIDE
from earl_core.run.policy_versions import MADE
from earl_core.weights.probe import PREFIXES
from tasks.publish import input_weights
from tasks.stage import StageInputs, stage_task

logger = logging.getLogger(__name__)


@stage_task
def update(given: StageInputs) -> dict[str, Any]:
    """Train the newest policy version, once; that makes the next one."""
    controller, iteration, deployment = given.controller, given.iteration, given.plan["update"]
    taken = taken_before(controller.run, iteration + 1)

    def pinned() -> None:
        if controller.config.schedule.pinned:
            # Rollouts to come play this version, too, which nobody holds after the update.
            input_weights(controller, deployment, iteration, "update")

    factors: dict[str, float] = {}
    if times := caution_in(given.manifests.values()):
        factors["rate_factor"] = RATE_FACTOR**times
        if controller.config.algorithm.kl.placement == "loss":
            factors["kl_factor"] = KL_FACTOR**times
        text = caution_text(controller.config, times)
        controller.run.note(iteration, "update", text)
        controller.listener("update", iteration, {"say": f"iteration {iteration}: {text}"})
    taking = taking_part(controller.config, controller.config.imitates(iteration))
    result, sealed = trained(
        given,
        "update",
        pinned,
        factors,
        **{BESIDE: [s.role for s in taking if s.makes == "state" and s.name != "update"]},
        prompts_trained=taken.prompts,
        demonstrations_trained=taken.demonstrations,
    )
    if warning := controller.config.mismatch_watch.warning(result["metrics"], iteration):
        logger.warning("%s", warning)
    if small := too_small(result["metrics"], controller.config.update.least_sample_size):
        logger.warning("iteration %d: %s", iteration, small)
    made = {MADE: result["policy_version"], PREFIXES: result[PREFIXES]}
    return {**sealed, "outputs": {**sealed["outputs"], **made}}


def trained(
    given: StageInputs,
    stage: str,
    before: Callable[[], None] = lambda: None,
    factors: Mapping[str, Any] | None = None,
    **record: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Have the learner of a stage that trains apply its update, once, and save it where a
    checkpoint is due; what it returned, and what the stage seals of that.

    before: done while the learner holds the version that it goes on from. factors: of its settings
    in this update, as of `LearnerWorker.update`. record: what its checkpoint says besides.
    """
    controller, iteration, deployment = given.controller, given.iteration, given.plan[stage]
    run, learner = controller.run, controller.learners[stage]
    checkpoint = learner.checkpoint(iteration) if due(controller, iteration) else None
    load = training_load(rows_of(given.manifests))
    watch = StageWatch(controller, deployment, iteration)
    with watch.fitting(load):
        ensure_learner(controller, deployment, iteration, run.versions.before(iteration))
        before()
        if not controller.hardware.gpus:
            # With GPUs whoever asks for a learner has made room already.
            controller.groups.make_room(stage, deployment)
        result = call_learner(
            controller,
            deployment,
            "update",
            iteration,
            agreed=("policy_version", "digest", "steps_applied"),
            manifests=given.references,
            link_bytes=given.plan.link_bytes(stage),
            checkpoint=str(checkpoint) if checkpoint else None,
            **(factors or {}),
            record={
                "run": run.uid,
                "tracking": run.record.get("tracking"),
                "key": controller.verdicts[iteration, stage].key,
                **record,
            },
        )
    learner.version = int(result["policy_version"])
    learner.drop_handoff()
    run.note(iteration, stage, f"steps applied: {result['steps_applied']}")
    metrics = {**result["metrics"], "peak_bytes": controller.groups.peak_bytes(stage)}
    outputs = watch.measured(metrics) if result["steps_applied"] else {}
    outputs |= {"digest": result["digest"]}
    return result, {"shards": result["shards"], "outputs": outputs, "metrics": metrics}


def due(controller: RunController, iteration: int) -> bool:
    """Tell whether the iteration ends with a checkpoint."""
    config = controller.config
    last = iteration + 1 >= config.iterations
    return last or controller.single_iteration or (iteration + 1) % config.checkpoint.every == 0
