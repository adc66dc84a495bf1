"""The candidates of all stages together: the combination with the least cost, for each division of
the devices, and which of these is taken."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from earl_core.deployment.stage_deployment import Move, StageDeployment, move_between
from earl_core.deployment.stages import SELECTABLE
from earl_core.selector.choice.changes import switch_seconds
from earl_core.selector.choice.division import (
    Combination,
    division_text,
    divisions,
    iteration_seconds,
    lack_of_memory,
    running_division,
    waits,
)
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan, Prediction
from earl_core.selector.choice.search_space import offers
from earl_core.selector.choice.selection import SelectionInput, fixed_plan
from earl_core.selector.model.candidates import RuledOut

Rows = dict[str, list[Prediction]]
"""Predictions by stage."""


class Way(NamedTuple):
    """What is best under one division of the devices.

    found: all candidates, best first. current: the running deployments under the new load; none
    where the devices would change sides. chosen: of each stage that is laid out. cost: seconds of
    an iteration, with each switch spread over the expected stay.
    """

    predictor: Predictor
    found: Rows
    current: Combination
    chosen: Combination
    cost: float

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, without switches."""
        return iteration_seconds(self.predictor, self.chosen)

    @property
    def text(self) -> str:
        """Its division, in words."""
        return division_text(self.predictor.division, self.predictor.given)


def ways(given: SelectionInput) -> list[Way]:
    """One for each division in which there is something feasible, the one that is taken first.

    The devices change sides only when the iteration gains more than noise. Raises `NoFeasiblePlan`
    where no division has anything.
    """
    found: list[Way] = []
    problems: list[NoFeasiblePlan] = []
    offered, running = divisions(given), running_division(given)
    for division in offered:
        try:
            found.append(_way(given, Predictor(given, division=division)))
        except NoFeasiblePlan as problem:
            problems.append(problem)
    if not found:
        raise problems[offered.index(running) if running in offered else 0]
    found.sort(key=lambda way: way.cost)
    # A run begins in turn, unless more than noise speaks for something else.
    begins = offered[0] if given.stages.placement is None else None
    resting = begins if running is None else running
    stay = next((way for way in found if way.predictor.division == resting), None)
    if stay is not None:
        least = stay.cost * (1 - given.selector.hysteresis)
        if near(stay.predictor) or found[0].cost >= least:
            found.remove(stay)
            found.insert(0, stay)
    return found


def division_reason(found: Sequence[Way]) -> str:
    """Say what the devices' division makes of an iteration, and what others would. found: as `ways`
    gives them."""
    taken, others = found[0], found[1:]
    predictor, given = taken.predictor, taken.predictor.given
    engines, ranks = waits(predictor, taken.chosen)
    text = f"{taken.text}: an iteration takes {taken.seconds:.3g} s"
    if predictor.division.placement != "shared":
        text += f", in which the engines wait {engines:.3g} s and the update's ranks {ranks:.3g} s"
    if others:
        other = min(others, key=lambda way: way.seconds)
        text += f"; the best other division ({other.text}) would take {other.seconds:.3g} s"
    older = given.staleness + 1
    now = min(way.seconds for way in found)
    then = min(iteration_seconds(way.predictor, way.chosen, older) for way in found)
    gain = 100 * (1 - then / now) if now > 0 else 0.0
    more = f"{gain:.1f} %" if gain >= 0.1 else "nothing"
    return f"{text}; staleness {older} would gain {more}"


def _way(given: SelectionInput, predictor: Predictor) -> Way:
    found, out = evaluate(predictor)
    for stage, rows in found.items():
        if not rows or not rows[0].allowed:
            nearest = min(rows, key=lambda row: (row.peak / row.budget, row.filled), default=None)
            raise NoFeasiblePlan(stage, nearest, [each for each in out if each.stage == stage])
    running = running_division(given)
    moved = running not in (None, predictor.division)
    current: Combination = {} if moved else _current(predictor, found)
    chosen = _joint(predictor, found, current)
    cost = _cost(predictor, chosen, current)
    if moved:
        cost += _moving_seconds(given, found)
    return Way(predictor, found, current, chosen, cost)


def _moving_seconds(given: SelectionInput, found: Rows) -> float:
    """Seconds in which every group is built again on other devices, spread over the stay."""
    known, guess = given.statistics.switch_seconds, given.selector.switch_seconds
    return sum(known.get(stage, guess) for stage in found) / _stay(given)


def _stay(given: SelectionInput) -> int:
    stay = given.selector.expected_stay
    return min(stay, given.iterations_left or stay)


def evaluate(predictor: Predictor) -> tuple[Rows, list[RuledOut]]:
    """Every stage's candidates with predictions, best first, and what was not offered."""
    given = predictor.given
    found: Rows = {}
    out: list[RuledOut] = []
    for stage in SELECTABLE:
        if not given.chosen(stage) or stage not in given.selector.stages:
            continue
        candidates, problems = offers(predictor, stage)
        rows = [predictor.predict(candidate, predictor.now) for candidate in candidates]
        found[stage] = sorted(rows, key=_order)
        out += problems
    return found, out


def _order(row: Prediction) -> tuple[bool, float, int, StageDeployment]:
    return bool(row.problem), row.seconds, row.candidate.ranks, row.candidate


def _current(predictor: Predictor, found: Rows) -> Combination:
    """Predict the running deployments under the new load, as far as there are any."""
    running = predictor.given.current.stages if predictor.given.current is not None else {}
    return {
        stage: predictor.predict(predictor.candidate_of(running[stage]), predictor.now)
        for stage in found
        if stage in running
    }


def _joint(predictor: Predictor, found: Rows, current: Combination) -> Combination:
    """The combination of candidates with the least cost, where each stage that leaves what it has
    must gain more than noise for that.

    Stages meet in the republished weights only, whose cost depends on tensor parallelism, sharding
    and the ranks that hold a copy together; what a switch costs depends on the kind of move. So
    the best of each such class is all that can win. Raises `NoFeasiblePlan` where none fits beside
    the others.
    """
    kept: Combination = {stage: row for stage, row in current.items() if row.allowed}
    settled = len(kept) == len(found) and near(predictor)
    if predictor.given.current is None:
        kept = _configured(predictor, found)
    beside = predictor.division.placed.side_by_side
    options = {s: _classes(r, kept.get(s), current.get(s), beside) for s, r in found.items()}
    staying = {s: [kept[s]] if s in kept else rows for s, rows in options.items()}
    stay = _least(predictor, staying, current)
    if settled and stay is not None:
        return stay[1]
    reluctance = predictor.given.selector.hysteresis * stay[0] if stay is not None else 0.0
    best = _least(predictor, options, current, kept, reluctance)
    if best is None:
        problem = lack_of_memory(predictor, [rows[-1] for rows in options.values()])
        label = division_text(predictor.division, predictor.given)
        raise NoFeasiblePlan("update", None, [RuledOut("update", label, problem)])
    return best[1]


def _configured(predictor: Predictor, found: Rows) -> Combination:
    """Return the deployments that the configuration names, where they are on offer: a run begins
    with them unless more than noise speaks for others. A stage left open begins with nothing."""
    plan = fixed_plan(predictor.given)
    named = [stage for stage in found if not predictor.given.leaves_open(stage)]
    wanted = {predictor.candidate_of(plan[stage]) for stage in named}
    return {
        stage: row
        for stage, rows in found.items()
        for row in rows
        if row.candidate in wanted and row.allowed
    }


def near(predictor: Predictor) -> bool:
    """Tell whether the load is, within noise, still that of the current plan's choice."""
    given, now = predictor.given, predictor.now
    basis = given.current.basis if given.current is not None else None
    if basis is None:
        return False
    noise = given.selector.hysteresis
    ratio = (1 + noise / 2) / (1 - noise / 2) * (1 + 1e-9)
    pairs = zip(
        (now.context, now.longest, float(now.episodes)),
        (basis.context, basis.longest, basis.requests),
        strict=True,
    )
    return all(max(a, b) <= ratio * min(a, b) for a, b in pairs)


def _classes(
    rows: list[Prediction], kept: Prediction | None, running: Prediction | None, beside: bool
) -> list[Prediction]:
    """The best of each class that republishing and switching tell apart, and what is kept. beside:
    others work at the same time, so that the smallest counts too, which stands last."""
    best: dict[tuple[int, bool, int, Move], Prediction] = {}
    for row in rows:
        if row.allowed:
            new = row.candidate
            move = move_between(running.candidate, new) if running else "rebuild"
            group = new.ranks // new.replicas  # its bandwidth ends at the host
            best.setdefault((new.tensor_parallel, new.parts == 1, group, move), row)
    usable = (row for row in rows if row.allowed)
    smallest = [min(usable, key=lambda row: row.peak)] if beside else []
    return [*best.values(), *([kept] if kept is not None else []), *smallest]


def _least(
    predictor: Predictor,
    options: Rows,
    current: Combination,
    kept: Combination | None = None,
    reluctance: float = 0.0,
) -> tuple[float, Combination] | None:
    """Return the cost and the combination; None where none fits. reluctance: seconds that a stage
    must gain to leave what is kept of it."""
    held = kept or {}

    def key(rows: Combination) -> tuple[float, int, list[StageDeployment]]:
        left = sum(held.get(stage, row) is not row for stage, row in rows.items())
        candidates = [row.candidate for row in rows.values()]
        cost = _cost(predictor, rows, current) + reluctance * left
        # The last part makes ties depend on the candidates alone, not on their order.
        return cost, sum(each.ranks for each in candidates), candidates

    every = (
        dict(zip(options, rows, strict=True))
        for rows in itertools.product(*options.values())
        if not lack_of_memory(predictor, rows)
    )
    best = min(every, key=key, default=None)
    return None if best is None else (key(best)[0], best)


def _cost(predictor: Predictor, rows: Combination, current: Combination) -> float:
    """Seconds of an iteration, with each switch spread over the expected stay."""
    switches = sum(
        switch_seconds(predictor, current[stage].candidate, row.candidate)
        for stage, row in rows.items()
        if stage in current
    )
    return iteration_seconds(predictor, rows) + switches / _stay(predictor.given)
