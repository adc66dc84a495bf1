"""The reference stage: log-probs of the episodes under the frozen initial policy."""

from __future__ import annotations

from typing import Any

from earl_core.cluster.rpc import Rule, merge_results
from earl_core.control.learner import call_together
from earl_core.control.stage_execution import StageWatch, training_load
from earl_core.run.worker import READ_RULES
from tasks.stage import StageInputs, stage_task

_RULES: dict[str, Rule] = {
    "seconds": "max",
    "tokens_per_second": "sum",
    "peak_rss_bytes": "max",
    "peak_cuda_bytes": "max",
    "other_cuda_bytes": "max",
    **READ_RULES,
}


@stage_task
def reference(given: StageInputs) -> dict[str, Any]:
    """Score the rollout's samples with the initial model."""
    controller, deployment = given.controller, given.plan["reference"]
    load = training_load(given.manifests["rollout"])
    watch = StageWatch(controller, deployment, given.iteration)
    with watch.fitting(load):
        with watch.timing_switch():
            controller.groups.get("reference", deployment)
        results = call_together(
            controller,
            deployment,
            "reference",
            "score",
            given.iteration,
            manifests=given.references,
            link_bytes=given.plan.link_bytes("reference"),
        )
    result = merge_results(results, _RULES)
    metrics = result["metrics"]
    metrics["peak_bytes"] = controller.groups.peak_bytes("reference")
    # Without a row nothing was measured.
    return {**result, "outputs": watch.measured(metrics) if result["shards"] else {}}
