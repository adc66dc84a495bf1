"""Policies, which choose among candidates, and `select`, which asks the configured one.

`fixed` moves nothing. `average_context` is the rule of the EARL paper (arXiv 2510.05943): rollout
only, by the mean context alone. `live_tokens` takes the least predicted time of the whole
iteration, the cost of switching included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from earl_core.deployment.plan import Basis, DeploymentPlan, StagePrediction
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import SELECTABLE
from earl_core.selector.choice.changes import reason_of, tokens
from earl_core.selector.choice.combination import division_reason, near, ways
from earl_core.selector.choice.division import divided_anew
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan, Prediction
from earl_core.selector.choice.search_space import offers, with_fitting_microbatch
from earl_core.selector.choice.selection import (
    CONTEXT_RAISED,
    SelectionInput,
    fixed_plan,
    model_length,
)
from earl_core.selector.model.candidates import deployed
from earl_core.selector.model.memory_model import gib
from earl_core.selector.profile.observations import training_rate

Policy = Callable[[SelectionInput], DeploymentPlan]


def select(given: SelectionInput) -> DeploymentPlan:
    """The plan for one iteration. Pure: equal inputs give equal plans, no I/O, no clock.

    The configured policy decides; under `fixed` only the rollout's context length moves: it is
    doubled before the longest episode seen would reach it, up to the model's position range.
    Raises `NoFeasiblePlan`, naming the bytes needed, when no candidate of a stage is feasible.
    """
    plan = POLICIES[given.selector.policy](with_fitting_microbatch(given))
    if not given.policy_reason:
        return plan
    return plan.model_copy(update={"reasons": {**plan.reasons, "policy": given.policy_reason}})


def choose_as_far_as_it_fits(given: SelectionInput) -> tuple[SelectionInput, DeploymentPlan]:
    """`select` by as much of the forecast as some candidate fits, and the input with that much.

    The growth may end before, and so may the run: as long as the next iteration fits, it goes on.
    Raises `NoFeasiblePlan` when that does not.
    """
    ahead = given.selector.forecast
    while True:
        selector = given.selector.model_copy(update={"forecast": ahead})
        shorter = given.model_copy(update={"selector": selector})
        try:
            return shorter, select(shorter)
        except NoFeasiblePlan:
            if not ahead:
                raise
            ahead //= 2


def fixed(given: SelectionInput) -> DeploymentPlan:
    """Every stage as configured, with what is predicted of it. Raises `NoFeasiblePlan` for what
    cannot fit a GPU whatever the load is."""
    plan = fixed_plan(given)
    predictor = Predictor(given)
    if not predictor.memory.shared:
        for stage in ("update", "rollout"):
            _check_own_part(predictor, predictor.candidate_of(plan[stage]))
    return _with_predictions(plan, predictor)


def _check_own_part(predictor: Predictor, candidate: StageDeployment) -> None:
    """Raise `NoFeasiblePlan` where what a rank holds of the parameters is more than its device."""
    stage, parts = candidate.stage, candidate.tensor_parallel * candidate.parts
    own, room = predictor.own_part(candidate), float(predictor.memory.device.memory_bytes)
    if own <= room:
        return
    what, keys = "weights", "tensor_parallel"
    if stage == "update":
        what += ", gradients and optimizer state"
        keys += " x shard x context_parallel"
    problem = (
        f"its {what} alone take {gib(own)} of each device, which has {gib(room)}, and the policy "
        f"`fixed` moves nothing: stages.{stage} needs {keys} of {math.ceil(own * parts / room)} "
        "at least"
    )
    raise NoFeasiblePlan(stage, Prediction(candidate, math.inf, own, room, problem=problem))


def _with_predictions(plan: DeploymentPlan, predictor: Predictor) -> DeploymentPlan:
    """The plan with what is predicted of its stages; of one that cannot run so nothing is said."""
    found, load = {}, predictor.now
    for stage in SELECTABLE:
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


def live_tokens(given: SelectionInput) -> DeploymentPlan:
    """Least predicted time of the whole iteration, over all stages together."""
    offered = ways(given)
    taken = offered[0]
    predictor = taken.predictor
    resting = fixed_plan(predictor.given)
    stages, reasons = dict(resting.stages), dict(resting.reasons)
    for stage, row in taken.chosen.items():
        stages[stage] = deployed(row.candidate, given.hardware)
        reasons[stage] = reason_of(predictor, taken.found[stage], taken.current.get(stage), row)
    if given.divides:
        reasons["placement"] = division_reason(offered)
    if "rollout" in taken.chosen:
        stages["rollout"] = stages["rollout"]._replace(max_model_len=predictor.max_model_len)
        if predictor.length_reason.startswith(CONTEXT_RAISED):
            reasons["rollout"] += f"; {predictor.length_reason}"
    for stage in SELECTABLE:
        if stage in stages and (home := given.in_ranks_of(stage)) != stage:
            stages[stage] = stages[home]._replace(stage=stage)
    now = predictor.now
    basis = Basis(context=now.context, longest=now.longest, requests=float(now.episodes))
    if given.current is not None and near(predictor):
        # A basis that followed every small step would let noise walk away with it.
        basis = given.current.basis or basis
    changes = {
        "stages": stages,
        "reasons": reasons,
        "policy": "live_tokens",
        "basis": basis,
        "fetch_bandwidth": given.hardware.fetch_bandwidth,
        "division": predictor.division if given.divides else None,
        "divided_anew": divided_anew(given, predictor.division),
    }
    return _with_predictions(resting.model_copy(update=changes), predictor)


def average_context(given: SelectionInput) -> DeploymentPlan:
    """The paper's rule: the degree that was fastest in the range in which the mean context lies.

    Ranges are those of the profile (else powers of two), measured with one number of sequences per
    engine; how many really run is not looked at, and nothing but the rollout moves.
    """
    plan, predictor = fixed_plan(given), Predictor(given)
    candidates, _ = offers(predictor, "rollout")
    mean = given.statistics.context_mean[-1] if given.statistics.context_mean else 0.0
    mean = max(1.0, mean or predictor.now.context)
    context = _range(given, mean)
    requests = float(given.selector.profiled_requests or _usual_requests(given))
    running = given.rollout.max_running_requests
    usable = [
        each
        for each in candidates
        if each.max_running_requests == running and not predictor.is_forbidden(each)
    ]

    def per_device(each: StageDeployment) -> tuple[float, StageDeployment]:
        rate = predictor.rate(each, context, requests)[0]
        return rate / (each.tensor_parallel * each.threads), each

    changes: dict[str, Any] = {"policy": "average_context"}
    if usable:
        best = max(usable, key=per_device)
        reason = (
            f"{best.label}: fastest per device at {tokens(context)} tokens and {requests:.0f} "
            f"sequences, the range of the mean context of {mean:.0f}; {model_length(given)[1]}"
        )
        engines = best._replace(max_model_len=plan["rollout"].max_model_len)
        changes["stages"] = {**plan.stages, "rollout": engines}
        changes["reasons"] = {**plan.reasons, "rollout": reason}
    return _with_predictions(plan.model_copy(update=changes), predictor)


def _range(given: SelectionInput, mean: float) -> float:
    contexts = sorted({p.context for p in given.profile.points if p.key.startswith("rollout")})
    below = [context for context in contexts if context <= mean]
    if contexts:
        return below[-1] if below else contexts[0]
    return float(2 ** int(math.log2(mean)))


def _usual_requests(given: SelectionInput) -> int:
    """Sequences per engine that the profile has most often; else what the configuration allows."""
    measured = [p.requests for p in given.profile.points if p.key.startswith("rollout")]
    if measured:
        return round(Counter(sorted(measured)).most_common(1)[0][0])
    return min(given.rollout.max_running_requests, given.rollout.episodes_per_iteration)


POLICIES: dict[str, Policy] = {
    # What is laid out without a run, which would have settled it, is laid out as configured.
    "auto": fixed,
    "fixed": fixed,
    "average_context": average_context,
    "live_tokens": live_tokens,
}
"""Policies by the name in `selector.policy`."""
