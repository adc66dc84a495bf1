"""The update stage: optimizer steps on the iteration's episodes, and a checkpoint when due."""

from __future__ import annotations

import logging
from typing import Any

from prefect import task

from earl_core.control.learner import call_learner, drop_handoff, ensure_learner
from earl_core.control.observation import StageWatch, load_of
from earl_core.control.run_controller import RunController, controller_of
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
    controller = controller_of(run)
    deployment = plan_of(controller, plan)["update"]
    given = [rollout, *([reference] if reference else []), advantage]
    inputs = [resolve(controller, stage) for stage in given]
    record = {
        "run": controller.run.uid,
        "tracking": controller.run.record.get("tracking"),
        "key": controller.verdicts[iteration, "update"].key,
    }

    def body() -> dict[str, Any]:
        checkpoint = (
            controller.run.checkpoint_path(iteration) if due(controller, iteration) else None
        )
        load = load_of(inputs[0].metrics)
        watch = StageWatch(controller, deployment, iteration)
        with watch.fitting(load):
            ensure_learner(controller, deployment, iteration, version=iteration)
            result = call_learner(
                controller,
                deployment,
                "update",
                iteration,
                agreed=("policy_version", "digest", "steps_applied"),
                manifests=[manifest.model_dump(mode="json") for manifest in inputs],
                checkpoint=str(checkpoint.resolve()) if checkpoint else None,
                record=record,
            )
        controller.live_version = int(result["policy_version"])
        drop_handoff(controller)
        controller.run.note(iteration, "update", f"steps applied: {result['steps_applied']}")
        warning = controller.config.mismatch_watch.warning(result["metrics"], iteration)
        if warning:
            logger.warning("%s", warning)
        metrics = {**result["metrics"], "peak_bytes": controller.groups.peak_bytes("update")}
        if result["steps_applied"]:
            peak, seconds = metrics.get("peak_cuda_bytes", 0.0), metrics["seconds"]
            watch.measured(load, seconds, peak)
        return {
            "shards": result["shards"],
            "outputs": {"digest": result["digest"]},
            "metrics": metrics,
        }

    return run_stage(controller, iteration, "update", body)


def due(controller: RunController, iteration: int) -> bool:
    """Whether the iteration ends with a checkpoint."""
    config = controller.config
    last = iteration + 1 >= config.iterations
    return last or controller.single_iteration or (iteration + 1) % config.checkpoint.every == 0
