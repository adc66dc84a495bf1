"""The reference stage: log-probs of the samples under the frozen initial policy."""

from __future__ import annotations

from typing import Any

from earl_core.cluster.rpc import Rule, merge_results
from earl_core.control.learner import call_together, ensure_learner
from earl_core.control.stage_execution import StageWatch, training_load
from earl_core.deployment.stages import STAGES, rows_of
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
    """Score the rollout's samples with the initial model: a group's own, or the base of the adapter
    that the update's ranks train."""
    return scored(given, "reference", "score_reference")


def scored(given: StageInputs, stage: str, method: str) -> dict[str, Any]:
    """Have a method of the ranks that do a stage write its column for the rollout's samples."""
    controller, iteration = given.controller, given.iteration
    role = STAGES[stage].done_by(controller.config)
    deployment = given.plan[role]
    # What is seen of the stage is its own, whoever does it.
    watch = StageWatch(controller, deployment._replace(stage=stage), iteration)
    with watch.fitting(training_load(rows_of(given.manifests))):
        if role in controller.learners:
            version = controller.run.versions.before(iteration)
            ensure_learner(controller, deployment, iteration, version)
        else:
            with watch.timing_switch():
                controller.groups.get(role, deployment)
        results = call_together(
            controller,
            deployment,
            role,
            method,
            iteration,
            stage=stage,
            kept=role in controller.learners,
            manifests=given.references,
            link_bytes=given.plan.link_bytes(role),
        )
    result = merge_results(results, _RULES)
    metrics = result["metrics"]
    metrics["peak_bytes"] = controller.groups.peak_bytes(role)
    # Without a row nothing was measured.
    return {**result, "outputs": watch.measured(metrics) if result["shards"] else {}}
