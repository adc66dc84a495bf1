"""Numbers about an iteration's choice: what was predicted, what it came to, what moved.

All are named `selector/<stage>/...`, so that MLflow draws a stage's predicted and measured values
side by side in one section.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import CHECKPOINTING, StageDeployment
from earl_core.deployment.stages import SELECTABLE
from earl_core.dispatch import Manifest
from earl_core.selector.choice.changes import stage_changes
from earl_core.selector.choice.explain import comparable_peak
from earl_core.selector.profile.observations import Observation

_TRAINING_ONLY = ("context_parallel", "shard", "activation_checkpointing", "offload_optimizer")
_TREND_WINDOW = 8


def selector_metrics(
    plan: DeploymentPlan,
    before: DeploymentPlan | None,
    manifests: Mapping[str, Manifest],
    seen: Sequence[Observation],
    gpus: int,
) -> dict[str, float]:
    """`selector/...` of one finished iteration.

    before: the last iteration's plan. manifests: the iteration's, by stage. seen: what the run
    observed in it. gpus: of the hardware; peaks are those of one of them, without any those of
    the whole stage. Seconds, bytes, tokens; what is on or off is 1 or 0; activation checkpointing
    is 0 (none), 1 (selective) or 2 (full).
    """
    moved = {change.stage for change in stage_changes(before, plan) if change.switched}
    metrics = {"selector/attempts": plan.attempt + 1.0, "selector/switches": float(len(moved))}
    for stage in SELECTABLE:
        if stage not in plan.stages or stage not in manifests:
            continue
        mine = [item for item in seen if item.stage == stage]
        numbers = {
            **_numbers(plan[stage]),
            **_predicted(plan, stage),
            "switched": float(stage in moved),
            "out_of_memory": float(sum(item.kind == "out_of_memory" for item in mine)),
            "switch_seconds": sum((i.seconds for i in mine if i.kind in _SWITCHES), start=0.0),
        }
        peak = _measured_peak(manifests[stage], mine, gpus)
        if peak > 0:
            numbers["measured_peak_bytes"] = peak
        measures = {"seconds": _measured_seconds(manifests[stage].metrics), "peak_bytes": peak}
        for what, measured in measures.items():
            predicted = numbers.get(f"predicted_{what}")
            if predicted and measured:
                numbers[f"predicted_over_measured_{what}"] = predicted / measured
        metrics.update({f"selector/{stage}/{name}": value for name, value in numbers.items()})
    return metrics


_SWITCHES = ("switched", "resharded")


def load_metrics(
    rollout: Mapping[str, float], earlier_contexts: Sequence[float]
) -> dict[str, float]:
    """Derive from a rollout's metrics the share of contexts that the model wrote, and their trend.

    rollout: the metrics of its manifest. earlier_contexts: mean contexts of the iterations before,
    oldest first. `context/trend` is in tokens an iteration, the slope through the last eight.
    """
    metrics: dict[str, float] = {}
    context = rollout.get("context/mean", 0.0)
    if context > 0:
        written = rollout.get("tokens_per_turn", 0.0) * rollout.get("turns/mean", 0.0)
        # Answers that open a new sample are counted once there and not in the context before it.
        metrics["rollout/generated_share"] = min(1.0, written / context)
        recent = [*earlier_contexts, context][-_TREND_WINDOW:]
        if len(recent) > 1:
            slope = statistics.linear_regression(range(len(recent)), recent).slope
            metrics["rollout/context/trend"] = slope
    return metrics


def _numbers(deployment: StageDeployment) -> dict[str, float]:
    """Its fields, but for sizes that have no limit."""
    left_out = ("stage", *(_TRAINING_ONLY if deployment.stage == "rollout" else ()))
    return {
        name: float(CHECKPOINTING.index(value) if name == "activation_checkpointing" else value)
        for name, value in deployment._asdict().items()
        if name not in left_out and (value or value is False)
    }


def _predicted(plan: DeploymentPlan, stage: str) -> dict[str, float]:
    prediction = plan.predictions.get(stage)
    if prediction is None:
        return {}
    names = {"budget_bytes": "budget_bytes", "measured": "measured_share"}
    found = prediction.model_dump().items()
    return {names.get(name, f"predicted_{name}"): value for name, value in found}


def _measured_seconds(stage: Mapping[str, float]) -> float:
    """Seconds of a stage by its own metrics: without the start of its workers, where it knows."""
    return float(stage.get("seconds", stage.get("stage_seconds", 0.0)))


def _measured_peak(manifest: Manifest, seen: Sequence[Observation], gpus: int) -> float:
    """Return the peak bytes of the run's own observation where it has one, because the next
    prediction learns from it; 0 where nothing is known."""
    own = [item for item in seen if item.kind == "measured"]
    if own:
        return comparable_peak(own[-1], gpus)
    return 0.0 if gpus else manifest.metrics.get("peak_bytes", 0.0)
