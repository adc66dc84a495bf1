"""Layout of a run's stages over its iterations: spans of equal stage deployments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from earl_core.deployment.plan import DeploymentPlan
from earl_core.selector.choice.changes import infeasible_text, stage_changes
from earl_core.selector.choice.explain import deployment_text
from earl_core.selector.profile.observations import INFEASIBLE, Observation


def deployment_spans(plans: Sequence[DeploymentPlan]) -> list[dict[str, Any]]:
    """Each stage deployment with its `first` and `last` iteration and `why`: the selector's reason
    at the first of them, after what became another. By stage, then iteration."""
    spans: dict[str, list[dict[str, Any]]] = {}
    before: DeploymentPlan | None = None
    for plan in plans:
        changes = {change.stage: change for change in stage_changes(before, plan)}
        for stage, deployment in plan.stages.items():
            own = spans.setdefault(stage, [])
            change = changes.get(stage)
            if own and change is None:
                own[-1]["last"] = plan.iteration
                continue
            why = plan.reasons.get(stage, "")
            own.append(
                {
                    "stage": stage,
                    "first": plan.iteration,
                    "last": plan.iteration,
                    "deployment": deployment_text(deployment),
                    "why": change.text.partition(": ")[2] if change else why,
                    "switched": bool(change and change.switched),
                }
            )
        before = plan
    return [span for own in spans.values() for span in own]


def infeasible(observations: Sequence[Observation]) -> list[str]:
    """A line for each stage that ran out of memory or context."""
    return [
        f"iteration {seen.iteration}: {infeasible_text(seen)}"
        for seen in observations
        if seen.kind in INFEASIBLE
    ]
