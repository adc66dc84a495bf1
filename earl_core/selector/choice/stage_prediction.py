"""What a plan expects of its stages: `StagePrediction`s, under every policy."""

from __future__ import annotations

import math

from earl_core.deployment.plan import DeploymentPlan, StagePrediction
from earl_core.selector.choice.predict import STAGES, Predictor
from earl_core.selector.profile.observations import training_rate


def with_predictions(plan: DeploymentPlan, predictor: Predictor) -> DeploymentPlan:
    """The plan with what is predicted of its stages; of one that cannot run so nothing is said."""
    found, load = {}, predictor.now
    for stage in STAGES:
        if stage not in plan.stages:
            continue
        candidate = predictor.candidate_of(plan[stage])
        row = predictor.predict(candidate, load)
        if all(map(math.isfinite, (row.seconds, row.peak, row.budget))):
            rate = training_rate(load, row.seconds)
            if stage == "rollout":
                rate = predictor.rate(candidate, load.context, load.offered(candidate))[0]
            found[stage] = StagePrediction(
                seconds=row.seconds,
                tokens_per_second=rate,
                peak_bytes=row.peak,
                budget_bytes=row.budget,
                measured=min(1.0, row.measured),
            )
    return plan.model_copy(update={"predictions": found})
