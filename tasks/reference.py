"""The reference stage: log-probs of the episodes under the frozen initial policy."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.cluster.results import Rule, merge_results
from earl_core.control.learner import call_together
from earl_core.control.observation import StageWatch, load_of
from earl_core.control.run_controller import controller_of
from tasks.select import plan_of
from tasks.stage import StageRef, resolve, run_stage

_RULES: dict[str, Rule] = {
    "seconds": "max",
    "tokens_per_second": "sum",
    "peak_rss_bytes": "max",
    "peak_cuda_bytes": "max",
}


@task(name="reference")
def reference(run: str, iteration: int, plan: StageRef, rollout: StageRef) -> StageRef:
    """Score the rollout's samples with the initial model."""
    controller = controller_of(run)
    deployment = plan_of(controller, plan)["reference"]
    played = resolve(controller, rollout)

    def body() -> dict[str, Any]:
        manifests = [played.model_dump(mode="json")]
        load = load_of(played.metrics)
        watch = StageWatch(controller, deployment, iteration)
        with watch.fitting(load):
            with watch.timing_switch():
                controller.groups.get("reference", deployment)
            results = call_together(
                controller, deployment, "reference", "score", iteration, manifests=manifests
            )
        result = merge_results(results, _RULES)
        metrics = result["metrics"]
        metrics["peak_bytes"] = controller.groups.peak_bytes("reference")
        peak = metrics.get("peak_cuda_bytes", 0.0)
        seconds = metrics["seconds"]
        watch.measured(load, seconds, peak)
        return result

    return run_stage(controller, iteration, "reference", body)
