"""Choice of the profile's next point to measure: the likeliest to change a choice for its time.

A survey is a pure function of what is known so far, so that one that was cut off goes on where it
ended. A point is worth measuring where its candidate might be the best one and little is known of
it; what workers must be started for it counts against it, shared with the other points that these
workers can measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from statistics import NormalDist, fmean
from typing import NamedTuple

from pydantic import Field

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import SELECTABLE, TRAINED
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.search_space import offers
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.sizes import powers
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, key_of, log_ratios
from earl_core.system.settings import Settings

GENERATED_TOKENS = 32
"""Tokens that each sequence decodes in a timed pass, at most."""

MICROBATCHES = 3
"""Full microbatches that stand for a whole update: all others take as long."""

WINDOW_SECONDS = 1.0
"""Least seconds for which a timed piece of work is repeated."""

START_SECONDS = 20.0
"""Seconds that starting workers takes until it was measured."""

_OVERHEAD_SECONDS = 0.3
_UNKNOWN_TURN = 512
_SHORTEST = 64

_GUESS_SPREAD = 0.4
"""Standard deviation of log(true / guessed throughput) between candidates of one stage, before any
is measured: those within a factor of one and a half of each other are rivals."""

_GUESS_WEIGHT = 2.0
"""So many measured candidates say as much about that spread."""

_NOISE_SPREAD = 0.04
"""The part of the spread that is left at a measured place."""

_ABSOLUTE = 0.02
"""Worth of knowing a place at all, next to what may be gained by a choice: seconds of stages are
weighed against each other and against switching."""

_LEAST_VALUE = 2e-3
"""Points worth less than this share of a stage's time are left out."""

_NORMAL = NormalDist()

PlaceKey = tuple[str, int, int]
"""Candidate and half octaves of context and requests: `ProfilePoint.bucket`."""


class Grid(Settings):
    """Places to measure. contexts: tokens of a sequence. episodes: of an iteration, up to the run's
    own number. Both ascend by powers of two."""

    contexts: tuple[int, ...] = Field(min_length=1)
    episodes: tuple[int, ...] = Field(min_length=1)


class Point(NamedTuple):
    """A place to measure.

    requests: sequences for each engine, or samples of the update. seconds: what it will take by
    prediction, with the start of its workers where others are running. value: the share of a
    stage's time that knowing it may save.
    """

    candidate: StageDeployment
    context: int
    requests: int
    seconds: float
    value: float

    @property
    def place(self) -> PlaceKey:
        """Its bucket in the profile table."""
        return ProfilePoint(
            key=key_of(self.candidate), context=self.context, requests=self.requests
        ).bucket


def grid_of(given: SelectionInput, longest: int | None = None) -> Grid:
    """Contexts from one answer's size up to `longest`, else to the model's position range."""
    limit = min(longest or given.model.max_positions, given.model.max_positions)
    turn = given.rollout.max_tokens_per_turn or _UNKNOWN_TURN
    sizes = powers(limit)
    contexts = [size for size in sizes if size >= max(_SHORTEST, turn)] or sizes[-1:]
    own = given.rollout.episodes_per_iteration
    return Grid(contexts=tuple(contexts), episodes=tuple(sorted({*powers(own), own})))


def workers_of(candidate: StageDeployment) -> StageDeployment:
    """The part of a candidate that needs other workers; the rest changes while they live.

    An engine has no place for other threads, ranks or replicas; ranks of an update take another
    token budget, checkpointing, chunks and offload as they are.
    """
    c = candidate
    return StageDeployment(
        c.stage, c.replicas, c.tensor_parallel, c.context_parallel, c.shard, c.threads
    )


def at_context(given: SelectionInput, context: int, table: ProfileTable) -> SelectionInput:
    """The input of a run whose episodes have this many tokens each, with this profile."""
    size = float(context)
    seen = Statistics(context_mean=(size,), context_max=(size,), turns_mean=(1.0,))
    # Engines are built for what they meet, not for the model's whole range.
    rollout = given.rollout.model_copy(update={"max_model_len": max(8, context)})
    changes = {"statistics": seen, "rollout": rollout, "profile": table, "current": None}
    return given.model_copy(update=changes)


def next_point(
    given: SelectionInput,
    grid: Grid,
    table: ProfileTable,
    seconds_left: float,
    *,
    running: StageDeployment | None = None,
    costs: Callable[[str], float] = lambda stage: START_SECONDS,
    skipped: Collection[PlaceKey] = (),
) -> Point | None:
    """The point to measure now; None when nothing fits the time or nothing is left worth it.

    running: the candidate whose workers live. costs: seconds to start a stage's workers. skipped:
    places that could not be measured, as `Point.place`; a larger load of a candidate that ran out
    of memory is never asked for. Equal arguments give equal points, and no point has the bucket of
    one in the table.
    """
    visits: dict[StageDeployment, list[Point]] = {}
    for point in _Survey(given, grid, table, frozenset(skipped)).points():
        visits.setdefault(workers_of(point.candidate), []).append(point)
    alive = workers_of(running) if running is not None else None
    rated = [
        _visit(points, 0.0 if workers == alive else costs(workers.stage), seconds_left)
        for workers, points in sorted(visits.items())
    ]
    return max(rated, key=lambda each: each[0], default=(0.0, None))[1]


def _visit(points: list[Point], start: float, seconds_left: float) -> tuple[float, Point | None]:
    """The most worth a second that a visit to these workers can have, and its first point; -1 where
    none fits the time."""
    ordered = sorted(points, key=lambda p: (-p.value / p.seconds, p.place))
    spent, gained, best = start, 0.0, 0.0
    first: Point | None = None
    for point in ordered:
        if spent + point.seconds > seconds_left:
            continue
        first = first or point
        spent, gained = spent + point.seconds, gained + point.value
        best = max(best, gained / spent)
    if first is None:
        return -1.0, None
    return best, first._replace(seconds=start + first.seconds)


class _Option(NamedTuple):
    """One candidate in one choice: its rate for the whole stage, and how well that is known."""

    candidate: StageDeployment
    requests: int
    log_rate: float
    spread: float
    known: float


class _Survey:
    """Everything that is worth measuring under one table."""

    def __init__(
        self, given: SelectionInput, grid: Grid, table: ProfileTable, skipped: frozenset[PlaceKey]
    ) -> None:
        self._given, self._grid, self._table = given, grid, table
        self._done = skipped | {point.bucket for point in table.points}
        self._predictor = Predictor(at_context(given, grid.contexts[0], table))
        self._offers = {context: self._offered(context) for context in grid.contexts}
        candidates = {key_of(c): c for found in self._offers.values() for c in found}
        self._spread = self._spreads(candidates)

    def points(self) -> Iterator[Point]:
        """Each place that is worth its time, once."""
        for context, offered in self._offers.items():
            found: dict[PlaceKey, Point] = {}
            for weight, options in self._choices(context, offered):
                for option, value in zip(options, _values(options), strict=True):
                    point = Point(option.candidate, context, option.requests, 0.0, weight * value)
                    if point.place in self._done:
                        continue
                    old = found.get(point.place)
                    if old is not None:
                        point = old._replace(value=old.value + point.value)
                    found[point.place] = point
            for point in found.values():
                if point.value >= _LEAST_VALUE:
                    yield point._replace(seconds=self._seconds(point))

    def _offered(self, context: int) -> list[StageDeployment]:
        """Candidates that fit the memory at this context; one of those that come to the same."""
        predictor = Predictor(at_context(self._given, context, self._table))
        kept: dict[StageDeployment, StageDeployment] = {}
        for stage in self._given.selector.stages:
            if not self._given.chosen(stage):
                continue
            for candidate in sorted(offers(predictor, stage)[0]):
                if predictor.predict(candidate, predictor.now).problem:
                    continue
                same = self._in_effect(candidate, context)
                # The least budget of those that come to the same, but the most sequences.
                if same not in kept or stage == "rollout":
                    kept[same] = candidate
        return list(kept.values())

    def _in_effect(self, candidate: StageDeployment, context: int) -> StageDeployment:
        """Clear the settings of a candidate that change nothing at this context: limits on running
        sequences are loads here, and budgets beyond all samples are alike."""
        if candidate.stage == "rollout":
            replicas = candidate.replicas if self._predictor.memory.shared else 1
            return candidate._replace(max_running_requests=0, replicas=replicas)
        filled = self._filled(candidate, context)
        chunk = candidate.logits_chunk_tokens
        return candidate._replace(
            max_tokens_per_microbatch=filled, logits_chunk_tokens=chunk if chunk < filled else 0
        )

    def _filled(self, candidate: StageDeployment, context: int) -> int:
        """Tokens of a microbatch in this candidate's update."""
        steps = self._given.steps_of(candidate.stage)
        samples = self._given.rollout.episodes_per_iteration / (steps * candidate.data_parallel)
        fitting = max(1, candidate.max_tokens_per_microbatch // context)
        return context * min(fitting, max(1, math.ceil(samples)))

    def _choices(
        self, context: int, offered: list[StageDeployment]
    ) -> Iterator[tuple[float, list[_Option]]]:
        """Every choice that a run at this context may have to make, and how much it matters."""
        own = self._grid.episodes[-1]
        for stage in SELECTABLE:
            mine = [c for c in offered if c.stage == stage]
            # Engines meet fewer sequences when episodes end or prompts are dropped; an update
            # always has about its number of samples.
            for episodes in self._grid.episodes if stage == "rollout" else (own,):
                options = [
                    self._option(candidate, context, episodes)
                    for candidate in mine
                    if stage != "rollout" or candidate.replicas <= episodes
                ]
                if options:
                    yield math.sqrt(episodes / own), options

    def _option(self, candidate: StageDeployment, context: int, episodes: int) -> _Option:
        requests = episodes
        if candidate.stage == "rollout":
            limit = candidate.max_running_requests or self._given.rollout.max_running_requests
            requests = max(1, min(round(episodes / candidate.replicas), limit))
        rate, known = self._predictor.rate(candidate, context, requests)
        if candidate.stage == "rollout":
            rate *= candidate.replicas
        spread = _NOISE_SPREAD + (1 - known) * (self._spread[candidate.stage] - _NOISE_SPREAD)
        return _Option(candidate, requests, math.log(max(rate, 1e-9)), spread, known)

    def _spreads(self, candidates: dict[str, StageDeployment]) -> dict[str, float]:
        """Estimate how far log(measured / guessed) of a candidate is from its stage's others."""
        found: dict[str, list[float]] = {stage: [] for stage in SELECTABLE}
        for key, points in self._table.by_key().items():
            candidate = candidates.get(key)
            if candidate is not None:
                guess = self._predictor.guess(candidate)
                ratios = [ratio for _, ratio in log_ratios(points, guess)]
                found[candidate.stage] += [fmean(ratios)] if ratios else []
        spreads = {}
        for stage, ratios in found.items():
            mean = fmean(ratios) if ratios else 0.0
            squares = sum((ratio - mean) ** 2 for ratio in ratios)
            prior = _GUESS_WEIGHT * _GUESS_SPREAD**2
            spread = math.sqrt((prior + squares) / (_GUESS_WEIGHT + max(0, len(ratios) - 1)))
            spreads[stage] = max(2 * _NOISE_SPREAD, spread)
        return spreads

    def _seconds(self, point: Point) -> float:
        """Predict the seconds of a measurement once the workers run."""
        candidate, context = point.candidate, point.context
        rate = max(self._predictor.rate(candidate, context, point.requests)[0], 1e-9)
        if candidate.stage == "rollout":
            one_pass = generated_tokens(context) * point.requests / rate
            factor = self._predictor.correction(candidate)(context, point.requests)[0]
            prompt = float(point.requests * context)
            reading = self._predictor.roofline.prefill_seconds(
                candidate.tensor_parallel, candidate.threads, prompt, context
            )
            return _OVERHEAD_SECONDS + reading / factor + 2 * one_pass + WINDOW_SECONDS
        tokens = self._filled(candidate, context) * candidate.data_parallel * (MICROBATCHES + 1)
        trained = self._given.settings_of(candidate.stage)
        epochs = trained.epochs if candidate.stage in TRAINED else 1
        return _OVERHEAD_SECONDS + tokens / (epochs * rate) + WINDOW_SECONDS


def generated_tokens(context: int) -> int:
    """Tokens that each sequence decodes in a timed pass at this context."""
    return max(1, min(GENERATED_TOKENS, context // 4))


def _values(options: list[_Option]) -> list[float]:
    """Return the gain that knowing each option may bring, as a share of the stage's time.

    The gain of an option that looks worse is how much it would be better by on average, if it
    should be the better one (expected improvement; Jones, Schonlau and Welch 1998, equation 15).
    The gain of the best is the most that any other may be better by. Each times the part of the
    doubt that lies in it.
    """
    best = max(options, key=lambda option: (option.log_rate, option.candidate))
    rivals = [(o, *_improvement(best, o)) for o in options if o is not best]
    values = {id(best): 0.0}
    for option, gain, variance in rivals:
        noise = _NOISE_SPREAD**2
        values[id(option)] = gain * (option.spread**2 - noise) / variance
        of_best = gain * (best.spread**2 - noise) / variance
        values[id(best)] = max(values[id(best)], of_best)
    return [values[id(o)] + _ABSOLUTE * (1 - o.known) for o in options]


def _improvement(best: _Option, other: _Option) -> tuple[float, float]:
    variance = best.spread**2 + other.spread**2
    deviation = math.sqrt(variance)
    behind = (best.log_rate - other.log_rate) / deviation
    gain = deviation * (_NORMAL.pdf(behind) - behind * _NORMAL.cdf(-behind))
    return max(0.0, gain), variance
