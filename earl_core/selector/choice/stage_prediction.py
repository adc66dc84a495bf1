"""What a plan expects of its stages: `StagePrediction`s, under every policy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from earl_core.deployment.stage_deployment import DeploymentPlan, StagePrediction
from earl_core.selector.choice.predict import STAGES, Prediction, Predictor
from earl_core.selector.profile.observations import offered_requests, training_rate


def predictions_of(
    predictor: Predictor, rows: Iterable[Prediction] = (), plan: DeploymentPlan | None = None
) -> dict[str, StagePrediction]:
    """By stage. rows: predictions that were made already; plan: its other stages are predicted.

    Of a stage that cannot run as laid out nothing is said.
    """
    known = {row.candidate.stage: row for row in rows}
    for stage in STAGES if plan else ():
        if plan and stage in plan.stages and stage not in known:
            candidate = predictor.candidate_of(plan[stage])
            known[stage] = predictor.predict(candidate, predictor.now)
    found = {}
    for stage, row in known.items():
        if all(math.isfinite(number) for number in (row.seconds, row.peak, row.budget)):
            found[stage] = StagePrediction(
                seconds=row.seconds,
                tokens_per_second=_rate(predictor, row),
                peak_bytes=row.peak,
                budget_bytes=row.budget,
                measured=min(1.0, row.measured),
            )
    return found


def _rate(predictor: Predictor, row: Prediction) -> float:
    load = predictor.now
    if row.candidate.stage != "rollout":
        return training_rate(load, row.seconds)
    offered = offered_requests(row.candidate, load.episodes)
    return predictor.rate(row.candidate, load.context, offered)[0]
