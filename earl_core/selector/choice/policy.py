"""Which candidate is taken: the policies, and `select`, which asks the configured one.

`fixed` moves nothing. `average_context` is the rule of the EARL paper (arXiv 2510.05943): rollout
only, by the mean context alone. `live_tokens` takes the least predicted time of the whole
iteration, the cost of switching included.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from earl_core.deployment.stage_deployment import Basis, DeploymentPlan
from earl_core.selector.choice.predict import STAGES, NoFeasiblePlan, Prediction, Predictor
from earl_core.selector.choice.reason import reason_of, tokens
from earl_core.selector.choice.search_space import offers
from earl_core.selector.choice.selection import (
    CONTEXT_RAISED,
    SelectionInput,
    fixed_plan,
    model_length,
)
from earl_core.selector.choice.stage_prediction import predictions_of
from earl_core.selector.choice.switch_cost import Move, move_between, switch_seconds
from earl_core.selector.model.candidates import Candidate, RuledOut

Policy = Callable[[SelectionInput], DeploymentPlan]


class Choice(NamedTuple):
    """How a plan came about: what was on offer and what became of it.

    predictions: of every stage, best first, ruled-out ones last. ruled_out: what was not offered.
    """

    plan: DeploymentPlan
    predictions: dict[str, list[Prediction]]
    ruled_out: list[RuledOut]


def select(given: SelectionInput) -> DeploymentPlan:
    """The plan for one iteration. Pure: equal inputs give equal plans, no I/O, no clock.

    The configured policy decides; under `fixed` only the rollout's context length moves: it is
    doubled before the longest episode seen would reach it, up to the model's position range.
    Raises `NoFeasiblePlan`, naming the bytes needed, when no layout of a stage fits the memory.
    """
    return POLICIES[given.selector.policy](given)


def choose_as_far_as_it_fits(given: SelectionInput) -> tuple[SelectionInput, DeploymentPlan]:
    """`select` by as much of the forecast as some layout fits, and the input with that much.

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
    """Every stage as configured, with what is predicted of it."""
    plan = fixed_plan(given)
    try:
        predictor = Predictor(given)
    except ValueError:
        # A mixture of experts runs as configured, though nothing can be said of it.
        return plan
    return plan.model_copy(update={"predictions": predictions_of(predictor, plan=plan)})


def evaluate(
    given: SelectionInput, predictor: Predictor | None = None
) -> tuple[Predictor, dict[str, list[Prediction]], list[RuledOut]]:
    """Every stage's candidates with predictions, best first."""
    predictor = predictor or Predictor(given)
    found: dict[str, list[Prediction]] = {}
    out: list[RuledOut] = []
    for stage in STAGES:
        left_out = stage == "reference" and not given.needs_reference
        if left_out or stage not in given.selector.stages:
            continue
        candidates, problems = offers(predictor, stage)
        rows = [predictor.predict(candidate, predictor.now) for candidate in candidates]
        found[stage] = sorted(rows, key=_order)
        out += problems
    return predictor, found, out


def _order(row: Prediction) -> tuple[bool, float, int, Candidate]:
    return bool(row.problem), row.seconds, row.candidate.ranks, row.candidate


def live_tokens(given: SelectionInput) -> DeploymentPlan:
    """Least predicted time of the whole iteration, over all stages together."""
    return choose(given).plan


def choose(given: SelectionInput, predictor: Predictor | None = None) -> Choice:
    """`live_tokens`, with everything that was considered."""
    predictor, found, out = evaluate(given, predictor)
    for stage, rows in found.items():
        if not rows or rows[0].problem or not math.isfinite(rows[0].seconds):
            nearest = min(rows, key=lambda row: (row.peak / row.budget, row.filled), default=None)
            raise NoFeasiblePlan(stage, nearest, [each for each in out if each.stage == stage])
    current = _current(given, predictor, found)
    chosen = _joint(given, predictor, found, current)
    reasons = {stage: reason_of(given, predictor, found, current, row) for stage, row in chosen}
    return Choice(_plan(given, predictor, dict(chosen), reasons), found, out)


def _current(
    given: SelectionInput, predictor: Predictor, found: dict[str, list[Prediction]]
) -> dict[str, Prediction]:
    """The running layouts, predicted under the new load, as far as there are any."""
    if given.current is None:
        return {}
    rows = {}
    for stage in found:
        running = given.current.stages.get(stage)
        if running is not None:
            rows[stage] = predictor.predict(predictor.candidate_of(running), predictor.now)
    return rows


Combination = tuple[tuple[str, Prediction], ...]


def _joint(
    given: SelectionInput,
    predictor: Predictor,
    found: dict[str, list[Prediction]],
    current: dict[str, Prediction],
) -> Combination:
    """The combination of layouts with the least cost, where each stage that leaves the layout it
    has must gain more than noise for that.

    Stages meet in the republished weights only, whose cost depends on tensor parallelism and
    sharding; what a switch costs depends on the kind of move. So the best of each such class is
    all that can win.
    """
    kept = {stage: row for stage, row in current.items() if row.allowed}
    settled = len(kept) == len(found) and _near(given, predictor)
    if given.current is None:
        kept = _configured(given, predictor, found)
    options = {s: _classes(rows, kept.get(s), current.get(s)) for s, rows in found.items()}
    staying = {s: [kept[s]] if s in kept else rows for s, rows in options.items()}
    cost, stay = _least(given, predictor, staying, current)
    if settled:
        return stay
    reluctance = given.selector.hysteresis * cost
    return _least(given, predictor, options, current, kept, reluctance)[1]


def _configured(
    given: SelectionInput, predictor: Predictor, found: dict[str, list[Prediction]]
) -> dict[str, Prediction]:
    """The layouts that the configuration names, where they are on offer: a run begins with them
    unless more than noise speaks for others."""
    plan = fixed_plan(given)
    wanted = {predictor.candidate_of(plan[stage]) for stage in found}
    return {
        stage: row
        for stage, rows in found.items()
        for row in rows
        if row.candidate in wanted and row.allowed
    }


def _near(given: SelectionInput, predictor: Predictor) -> bool:
    """Whether the load is, within noise, still the one that the current plan was chosen for."""
    basis = given.current.basis if given.current is not None else None
    if basis is None:
        return False
    noise = given.selector.hysteresis
    ratio = (1 + noise / 2) / (1 - noise / 2) * (1 + 1e-9)
    pairs = (
        (predictor.now.context, basis.context),
        (predictor.now.longest, basis.longest),
        (float(predictor.now.episodes), basis.requests),
    )
    return all(max(a, b) <= ratio * min(a, b) for a, b in pairs)


def _classes(
    rows: list[Prediction], kept: Prediction | None, running: Prediction | None
) -> list[Prediction]:
    """The best of each class that republishing and switching tell apart, and what is kept."""
    best: dict[tuple[int, bool, Move], Prediction] = {}
    for row in rows:
        if row.allowed:
            layout = row.candidate
            move = move_between(running.candidate, layout) if running else "rebuild"
            best.setdefault((layout.tensor, layout.parts == 1, move), row)
    found = list(best.values())
    return [*found, kept] if kept is not None else found


def _least(
    given: SelectionInput,
    predictor: Predictor,
    options: dict[str, list[Prediction]],
    current: dict[str, Prediction],
    kept: Mapping[str, Prediction] = MappingProxyType({}),
    reluctance: float = 0.0,
) -> tuple[float, Combination]:
    """reluctance: seconds that a stage must gain to leave what is kept of it."""
    stages = list(options)
    best: tuple[float, int, Combination] | None = None
    for rows in itertools.product(*options.values()):
        combination = tuple(zip(stages, rows, strict=True))
        cost = _cost(given, predictor, dict(combination), current)
        cost += reluctance * sum(kept.get(stage, row) is not row for stage, row in combination)
        ranks = sum(row.candidate.ranks for row in rows)
        # The last key makes ties depend on the layouts alone, not on their order.
        if best is None or (cost, ranks, _names(combination)) < (*best[:2], _names(best[2])):
            best = cost, ranks, combination
    assert best is not None
    return best[0], best[2]


def _names(combination: Combination) -> list[Candidate]:
    return [row.candidate for _, row in combination]


def _cost(
    given: SelectionInput,
    predictor: Predictor,
    rows: dict[str, Prediction],
    current: dict[str, Prediction],
) -> float:
    """Seconds of an iteration, with each switch spread over the expected stay."""
    seconds = sum(row.seconds for row in rows.values())
    if "update" in rows and "rollout" in rows:
        update, rollout = rows["update"].candidate, rows["rollout"].candidate
        seconds += predictor.roofline.republish_seconds(update, rollout)
    switches = sum(
        switch_seconds(given, predictor.roofline, current[stage].candidate, row.candidate)
        for stage, row in rows.items()
        if stage in current
    )
    return seconds + switches / expected_stay(given)


def expected_stay(given: SelectionInput) -> int:
    """Iterations over which a switch must pay."""
    left = given.iterations_left
    stay = given.selector.expected_stay
    return stay if left is None else max(1, min(stay, left))


def _plan(
    given: SelectionInput,
    predictor: Predictor,
    rows: dict[str, Prediction],
    reasons: dict[str, str],
) -> DeploymentPlan:
    resting = fixed_plan(given)
    stages = dict(resting.stages)
    for stage, row in rows.items():
        length = predictor.max_model_len if stage == "rollout" else None
        candidate = row.candidate
        if given.hardware.gpus:
            # What a rank does beside its device; no part of the choice.
            share = given.hardware.cpu_cores // given.hardware.devices_per_host
            candidate = candidate._replace(threads=max(1, share))
        stages[stage] = candidate.deployment(length)
    if "rollout" in reasons and predictor.length_reason.startswith(CONTEXT_RAISED):
        reasons = {**reasons, "rollout": f"{reasons['rollout']}; {predictor.length_reason}"}
    reasons = {**resting.reasons, **reasons}
    now = predictor.now
    basis = Basis(context=now.context, longest=now.longest, requests=float(now.episodes))
    if given.current is not None and given.current.basis and _near(given, predictor):
        # A basis that followed every small step would let noise walk away with it.
        basis = given.current.basis
    plan = DeploymentPlan(
        iteration=given.iteration,
        stages=stages,
        reasons=reasons,
        policy=given.selector.policy,
        basis=basis,
        attempt=given.attempt,
    )
    # Stages left as configured are part of the iteration too.
    predictions = predictions_of(predictor, rows.values(), plan)
    return plan.model_copy(update={"predictions": predictions})


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
    best = max(
        (c for c in candidates if c.running == running and c not in predictor.forbidden),
        key=lambda c: (predictor.rate(c, context, requests)[0] / (c.tensor * c.threads), c),
        default=None,
    )
    if best is None:
        predictions = predictions_of(predictor, plan=plan)
        return plan.model_copy(update={"policy": "average_context", "predictions": predictions})
    reason = (
        f"{best.label}: fastest per device at {tokens(context)} tokens and {requests:.0f} "
        f"sequences, the range of the mean context of {mean:.0f}; {model_length(given)[1]}"
    )
    deployment = best.deployment(plan["rollout"].max_model_len)
    plan = plan.model_copy(
        update={
            "stages": {**plan.stages, "rollout": deployment},
            "reasons": {**plan.reasons, "rollout": reason},
            "policy": "average_context",
        }
    )
    return plan.model_copy(update={"predictions": predictions_of(predictor, plan=plan)})


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
    "fixed": fixed,
    "average_context": average_context,
    "live_tokens": live_tokens,
}
"""By the name in `selector.policy`."""
