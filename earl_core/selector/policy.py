"""Which candidate is taken: the policies, and `select`, which asks the configured one.

`fixed` moves nothing. `average_context` is the rule of the EARL paper (arXiv 2510.05943): rollout
only, by the mean context alone. `live_tokens` takes the least predicted time of the whole
iteration, the cost of switching included.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from earl_core.selector.candidates import Candidate, RuledOut
from earl_core.selector.deployment import Basis, DeploymentPlan
from earl_core.selector.planned import predictions_of
from earl_core.selector.predict import STAGES, NothingFits, Prediction, Predictor
from earl_core.selector.selection import SelectionInput, fixed_plan
from earl_core.selector.switching import Move, move_between, switch_seconds

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
    Raises `NothingFits`, naming the bytes needed, when no layout of a stage fits the memory.
    """
    return POLICIES[given.selector.policy](given)


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
        candidates, problems = predictor.candidates(stage)
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
            raise NothingFits(stage, nearest)
    current = _current(given, predictor, found)
    chosen = _joint(given, predictor, found, current)
    reasons = {stage: _reason(given, predictor, found, current, row) for stage, row in chosen}
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


def _allowed(row: Prediction | None) -> bool:
    return row is not None and not row.problem and math.isfinite(row.seconds)


Combination = tuple[tuple[str, Prediction], ...]


def _joint(
    given: SelectionInput,
    predictor: Predictor,
    found: dict[str, list[Prediction]],
    current: dict[str, Prediction],
) -> Combination:
    """The combination of layouts with the least cost, unless staying is nearly as good.

    Stages meet in the republished weights only, whose cost depends on tensor parallelism and
    sharding; what a switch costs depends on the kind of move. So the best of each such class is
    all that can win.
    """
    kept = {stage: row for stage, row in current.items() if _allowed(row)}
    settled = len(kept) == len(found) and _near(given, predictor)
    options = {s: _classes(rows, kept.get(s), current.get(s)) for s, rows in found.items()}
    staying = {s: [kept[s]] if s in kept else rows for s, rows in options.items()}
    stay_cost, stay = _least(given, predictor, staying, current)
    if settled:
        return stay
    best_cost, best = _least(given, predictor, options, current)
    gain = stay_cost - best_cost
    return best if gain > given.selector.hysteresis * stay_cost or not kept else stay


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
        if _allowed(row):
            layout = row.candidate
            move = move_between(running.candidate, layout) if running else "rebuild"
            best.setdefault((layout.tensor, layout.shard == 1, move), row)
    found = list(best.values())
    return [*found, kept] if kept is not None else found


def _least(
    given: SelectionInput,
    predictor: Predictor,
    options: dict[str, list[Prediction]],
    current: dict[str, Prediction],
) -> tuple[float, Combination]:
    stages = list(options)
    best: tuple[float, int, Combination] | None = None
    for rows in itertools.product(*options.values()):
        combination = tuple(zip(stages, rows, strict=True))
        cost = _cost(given, predictor, dict(combination), current)
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


def _reason(
    given: SelectionInput,
    predictor: Predictor,
    found: dict[str, list[Prediction]],
    current: dict[str, Prediction],
    row: Prediction,
) -> str:
    stage = row.candidate.stage
    old = current.get(stage)
    guess = " (a guess: not measured)" if row.guess else ""
    if old is None or old.candidate == row.candidate:
        return _kept(predictor, found[stage], row, old is not None) + guess
    move = _move(old.candidate, row.candidate)
    if old.problem:
        return f"{move}: {old.problem}{guess}"
    gained = old.seconds - row.seconds
    cost = switch_seconds(given, predictor.roofline, old.candidate, row.candidate)
    text = f"{move}: {_situation(predictor, old)}; predicted {_percent(old, row)}"
    text += f" and {cost:.1f} s to switch"
    if gained > 0:
        count = math.ceil(cost / gained) or 1
        text += f", repaid after {count} iteration{'s' if count > 1 else ''}"
    return text + guess


def _kept(predictor: Predictor, rows: list[Prediction], row: Prediction, running: bool) -> str:
    verb = "kept" if running else "chosen"
    text = f"{row.candidate.label} {verb}: {_situation(predictor, row)}"
    others = [r for r in rows if _allowed(r) and r.candidate != row.candidate]
    if others and others[0].seconds < row.seconds:
        text += f"; {others[0].candidate.label} would gain {_percent(row, others[0])}"
        return text + ", too little for a switch or for the stages together"
    if others:
        slower = others[0].seconds / row.seconds - 1
        text += (
            f"; the next best, {others[0].candidate.label}, would take {100 * slower:.1f} % more"
        )
    return text


def _percent(old: Prediction, new: Prediction) -> str:
    return f"{100 * (old.seconds / new.seconds - 1):+.1f} %" if new.seconds > 0 else "nothing"


def _situation(predictor: Predictor, row: Prediction) -> str:
    layout, load = row.candidate, predictor.now
    if layout.stage != "rollout":
        share = 100 * row.peak / row.budget
        return f"the longest sample, {tokens(load.longest)} tokens, fills {share:.0f} % of memory"
    share = load.episodes / layout.replicas
    offered = max(1.0, min(share, layout.running or share))
    place = f"the KV cache at TP {layout.tensor}"
    if row.filled > 9.99:
        return (
            f"{offered:.0f} sequences x {tokens(load.context)} tokens are far too many for {place}"
        )
    return (
        f"{offered:.0f} sequences x {tokens(load.context)} tokens fill {100 * row.filled:.0f} % of "
        f"{place}"
    )


def _move(old: Candidate, new: Candidate) -> str:
    """The fields that differ, such as `TP 4 → 8`; whole layouts when many do."""
    changed = [
        (name, a, b)
        for name, a, b in zip(Candidate._fields, old, new, strict=True)
        if a != b and name not in ("replicas", "threads")
    ]
    names = {"tensor": "TP", "context": "CP", "microbatch": "microbatch", "running": "running"}
    if len(changed) == 1 and changed[0][0] in names:
        name, before, after = changed[0]
        return f"{names[name]} {before} → {after}"
    return f"{old.label} → {new.label}"


def tokens(count: float) -> str:
    """Such as `812` or `31K`, in units of 1,024."""
    return f"{count:.0f}" if count < 1024 else f"{count / 1024:.0f}K"


def average_context(given: SelectionInput) -> DeploymentPlan:
    """The paper's rule: the degree that was fastest in the range in which the mean context lies.

    Ranges are those of the profile (else powers of two), measured with one number of sequences per
    engine; how many really run is not looked at, and nothing but the rollout moves.
    """
    plan, predictor = fixed_plan(given), Predictor(given)
    candidates, _ = predictor.candidates("rollout")
    mean = given.statistics.context_mean[-1] if given.statistics.context_mean else 0.0
    mean = max(1.0, mean or predictor.now.context)
    context = _range(given, mean)
    requests = float(given.selector.profiled_requests or _usual_requests(given))
    failed = {predictor.candidate_of(layout) for layout in given.forbidden}
    running = given.rollout.max_running_requests
    best = max(
        (c for c in candidates if c.running == running and c not in failed),
        key=lambda c: (predictor.rate(c, context, requests)[0] / (c.tensor * c.threads), c),
        default=None,
    )
    if best is None:
        predictions = predictions_of(predictor, plan=plan)
        return plan.model_copy(update={"policy": "average_context", "predictions": predictions})
    reason = (
        f"{best.label}: fastest per device at {tokens(context)} tokens and {requests:.0f} "
        f"sequences, the range of the mean context of {mean:.0f}; {predictor.length_reason}"
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
