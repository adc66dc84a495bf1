"""Runs whose contexts grow, replayed on measurements: what each policy loses to hindsight.

A policy sees the contexts of finished iterations, set A as its profile, and the rate of what it
ran itself, as one repetition of set A had it. Seconds are those of set B, switches included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.selector_live_table import LiveTable, Truth, from_a, from_b, offered, whole
from earl_core.config.rollout import RolloutConfig, VllmConfig
from earl_core.config.selector import SelectorConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment, move_between
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.selection import WINDOW, SelectionInput, Statistics
from earl_core.selector.model.candidates import candidate_of
from earl_core.selector.profile.observations import (
    Observation,
    calibration_of,
    forbidden_of,
    refined,
    seconds_of,
)
from earl_core.selector.profile.profile_table import ProfileTable

STAGES = ("rollout", "update")
_OBSERVED = {"rebuild": "switched", "reshard": "resharded"}


class Growth(NamedTuple):
    """One run: its engine, the tokens of an episode in each iteration, episodes an iteration."""

    engine: str
    contexts: tuple[float, ...]
    responses: int


def growth(engine: str, first: int, last: int, iterations: int, responses: int) -> Growth:
    """Contexts that grow by equal factors."""
    factor = (last / first) ** (1 / (iterations - 1))
    return Growth(engine, tuple(first * factor**k for k in range(iterations)), responses)


@dataclass
class Switching:
    """Seconds that a change of layout costs, as measured; none where that was not."""

    start: dict[StageDeployment, float]
    stop: dict[StageDeployment, float]
    reshard: float
    learner: float = 0.0

    @classmethod
    def of(cls, table: LiveTable, engine: str) -> Switching:
        """Return the costs of the engine's layouts and of the update."""
        found = [switch for switch in table.switches if switch.engine == engine]
        return cls(
            {switch.candidate: switch.start for switch in found},
            {switch.candidate: switch.stop for switch in found},
            sorted(table.reshards)[len(table.reshards) // 2] if table.reshards else 0.0,
            table.learner_start,
        )

    def first(self, layout: StageDeployment) -> float:
        """Seconds to bring a stage up at the start of a run."""
        return self.learner if layout.stage == "update" else self.start.get(layout, 0.0)

    def cost(self, old: StageDeployment | None, new: StageDeployment) -> float:
        """Zero at the start of a run, when something must be built in any case."""
        if old is None or old == new:
            return 0.0
        if new.stage == "update":
            return self.reshard
        old, new = old._replace(max_running_requests=0), new._replace(max_running_requests=0)
        return self.stop.get(old, 0.0) + self.start.get(new, 0.0)


@dataclass
class Course:
    """The course of a run: seconds of each iteration, the layouts that it had, and how often a
    stage ran out of memory."""

    seconds: list[float] = field(default_factory=list)
    failures: int = 0
    layouts: dict[str, list[StageDeployment]] = field(
        default_factory=lambda: {s: [] for s in STAGES}
    )

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds)

    def switches(self, stage: str) -> int:
        """Changes of the stage's layout."""
        path = self.layouts[stage]
        return sum(a != b for a, b in itertools.pairwise(path))


class World:
    """A run's truth by both sets, and what may be chosen in it. fixed_fields: what was measured in
    one way only. budget: the microbatch that is configured."""

    def __init__(
        self,
        table: LiveTable,
        run: Growth,
        fixed_fields: tuple[str, ...] = ("update.logits_chunk_tokens",),
        budget: int = 512,
    ) -> None:
        self.table, self.run = table, run
        self.fixed_fields, self.budget = fixed_fields, budget
        self.seen, self.judge = (Truth(table, run.engine, pick) for pick in (from_a, from_b))
        self.switching = Switching.of(table, run.engine)
        self._last: Predictor | None = None

    def options(self, stage: str) -> list[StageDeployment]:
        """Every layout of a stage, rollouts also with each measured limit on sequences."""
        layouts = self.judge.layouts(stage)
        if stage == "update":
            return layouts
        limited = []
        for layout in layouts:
            sizes = {c.requests for c in self.table.of(self.run.engine) if c.candidate == layout}
            share = self.run.responses / layout.replicas
            limited += [
                layout,
                *(layout._replace(max_running_requests=n) for n in sorted(sizes) if n < share),
            ]
        return limited

    def layout_of(self, deployment: StageDeployment) -> StageDeployment:
        """Return the layout as it was measured: limits that limit nothing are none, a GPU's threads
        do not matter."""
        layout = candidate_of(deployment, self.table.hardware)
        if (
            layout.stage == "rollout"
            and layout.max_running_requests >= self.run.responses / layout.replicas
        ):
            return layout._replace(max_running_requests=0)
        return layout

    def seconds(self, layout: StageDeployment, context: float) -> float:
        """Return the seconds of the layout's stage in one iteration, on set B."""
        return self.judge.seconds(layout, context, self.run.responses)

    def matrix(self, stage: str, truth: Truth) -> list[list[float]]:
        """Seconds of the stage, by iteration and option."""
        options, episodes = self.options(stage), self.run.responses
        return [[truth.seconds(o, c, episodes) for o in options] for c in self.run.contexts]

    def take(
        self,
        course: Course,
        layouts: Mapping[str, StageDeployment],
        context: float,
        failed: Mapping[str, int] | None = None,
    ) -> None:
        """One iteration more under these layouts. failed: attempts that ran out of memory."""
        total = 0.0
        for stage, layout in layouts.items():
            path = course.layouts[stage]
            lost = failed[stage] if failed else 0
            total += (1 + lost) * self.seconds(layout, context)
            total += self.switching.cost(path[-1] if path else None, layout)
            course.failures += lost
            path.append(layout)
        course.seconds.append(total)

    def hindsight(self, truth: Truth) -> Course:
        """The best layouts of every iteration by one set, switches included, on set B."""
        paths = []
        for stage in STAGES:
            options = self.options(stage)
            costs = [[self.switching.cost(old, new) for new in options] for old in options]
            paths.append([options[i] for i in least_path(self.matrix(stage, truth), costs)])
        course = Course()
        for context, *layouts in zip(self.run.contexts, *paths, strict=True):
            self.take(course, dict(zip(STAGES, layouts, strict=True)), context)
        return course

    def fixed(self) -> list[tuple[float, StageDeployment, StageDeployment]]:
        """Every pair of layouts held throughout: seconds on set B, best first; infinite when the
        memory runs out."""
        totals = {}
        for stage in STAGES:
            columns = zip(*self.matrix(stage, self.judge), strict=True)
            totals[stage] = list(zip(self.options(stage), map(sum, columns), strict=True))
        pairs = itertools.product(totals["rollout"], totals["update"])
        return sorted((first + second, one, other) for (one, first), (other, second) in pairs)

    def failure(
        self, given: SelectionInput, deployment: StageDeployment, context: float
    ) -> Observation:
        """A stage that ran out of memory: all that there is was not enough."""
        budget = given.hardware.gpu_memory_bytes or given.hardware.memory_bytes
        return self._observation(
            given, deployment, context, kind="out_of_memory", peak_bytes=float(budget)
        )

    def observed(
        self, given: SelectionInput, plan: DeploymentPlan, context: float, turn: Truth
    ) -> list[Observation]:
        """List the observations that the run makes of its own layouts."""
        found = []
        for stage in STAGES:
            layout = self.layout_of(plan[stage])
            rate = turn.rate(layout, context, self.run.responses)
            peak = self.judge.peak(layout, context, self.run.responses)
            found.append(
                self._observation(
                    given, plan[stage], context, tokens_per_second=rate, peak_bytes=peak
                )
            )
        return found

    def switches(
        self, given: SelectionInput, old: DeploymentPlan | None, new: DeploymentPlan
    ) -> list[Observation]:
        """The changes of layout with their seconds, at the start all of them: a run times both."""
        found = []
        for stage in STAGES:
            before, after = (self.layout_of(plan[stage]) if plan else None for plan in (old, new))
            assert after is not None
            move = move_between(before, after) if before else "rebuild"
            if move in _OBSERVED:
                took = self.switching.first(after._replace(max_running_requests=0))
                seconds = self.switching.cost(before, after) if before else took
                kind = _OBSERVED[move]
                found.append(self._observation(given, new[stage], 1.0, kind=kind, seconds=seconds))
        return found

    def _predictor(self, given: SelectionInput) -> Predictor:
        if self._last is None or self._last.given is not given:
            self._last = Predictor(given)
        return self._last

    def _observation(
        self, given: SelectionInput, deployment: StageDeployment, context: float, **more: Any
    ) -> Observation:
        predictor = self._predictor(given)
        layout = predictor.candidate_of(deployment)
        load = predictor.now._replace(context=context, longest=context)
        return Observation(
            iteration=given.iteration,
            stage=layout.stage,
            deployment=deployment,
            context=context,
            longest=context,
            requests=offered(layout, self.run.responses),
            formula_bytes=predictor.formula_peak(layout, load),
            **{"kind": "measured", **more},
        )


def least_path(seconds: Sequence[Sequence[float]], costs: Sequence[Sequence[float]]) -> list[int]:
    """The options, one a row, whose seconds and changes (costs[old][new]) add up to the least."""
    best, back = list(seconds[0]), []
    for row in seconds[1:]:
        came = [
            min(range(len(best)), key=lambda old: best[old] + costs[old][new])
            for new in range(len(row))
        ]
        best = [best[old] + costs[old][new] + row[new] for new, old in enumerate(came)]
        back.append(came)
    path = [min(range(len(best)), key=best.__getitem__)]
    for came in reversed(back):
        path.append(came[path[-1]])
    return path[::-1]


Profile = Callable[[LiveTable, str], ProfileTable]


@dataclass(frozen=True)
class Policy:
    """A policy of the selector and what it may know. observes: its own rates so far; at: sequences
    at which `average_context` was measured."""

    name: str
    rule: str
    profile: Profile = whole
    observes: bool = False
    at: int | None = None

    def settings(self, fixed_fields: tuple[str, ...]) -> SelectorConfig:
        """Return the settings as a run file would have them."""
        return SelectorConfig(
            policy=self.rule, fixed_fields=fixed_fields, profiled_requests=self.at
        )


def follow(world: World, policy: Policy) -> Course:
    """A policy through a run. A stage that runs out of memory takes its time twice: it is repeated
    under what is chosen then."""
    run = world.run
    repetitions = min(len(cell.a) for cell in world.table.of(run.engine) if cell.a)
    turns = [
        Truth(world.table, run.engine, lambda cell, turn=turn: cell.a[turn])
        for turn in range(repetitions)
    ]
    seen: list[Observation] = []
    profile = policy.profile(world.table, run.engine)
    course, plan = Course(), None
    for number, context in enumerate(run.contexts):
        attempt, failed = 0, dict.fromkeys(STAGES, 0)
        while True:
            given = selection(world, policy, profile, number, attempt, plan, seen)
            chosen = select(given)
            layouts = {s: world.layout_of(chosen[s]) for s in STAGES}
            lacking = [s for s in STAGES if math.isinf(world.seconds(layouts[s], context))]
            if not lacking:
                break
            attempt += 1
            for stage in lacking:
                failed[stage] += 1
                seen.append(world.failure(given, chosen[stage], context))
        seen += world.switches(given, plan, chosen)
        if policy.observes:
            found = world.observed(given, chosen, context, turns[number % repetitions])
            profile = refined(profile, found, given.selector.half_life, world.table.hardware)
            seen += found
        plan = chosen
        world.take(course, layouts, context, failed)
    return course


def selection(
    world: World,
    policy: Policy,
    profile: ProfileTable,
    iteration: int,
    attempt: int,
    plan: DeploymentPlan | None,
    seen: Sequence[Observation],
) -> SelectionInput:
    """Make the input that `select` gets before an iteration."""
    run, table = world.run, world.table
    settings = policy.settings(world.fixed_fields)
    past = tuple(run.contexts[max(0, iteration - WINDOW) : iteration])
    statistics = Statistics(
        context_mean=past,
        context_max=past,
        generated_share=(1.0,),
        switch_seconds=seconds_of(seen, "switched"),
        reshard_seconds=seconds_of(seen, "resharded"),
    )
    return SelectionInput(
        iteration=iteration,
        attempt=attempt,
        rollout=RolloutConfig(
            engine=run.engine,
            prompts_per_iteration=run.responses,
            group_size=1,
            max_turns=1,
            max_tokens_per_turn=round(run.contexts[0]),
            max_model_len=table.context_limit,
            max_running_requests=max(c.requests for c in table.of(run.engine) if c.engine),
            vllm=VllmConfig(kv_cache_gib=1),
        ),
        update=UpdateConfig(max_tokens_per_microbatch=world.budget),
        needs_reference=False,
        hardware=table.hardware,
        model=table.model,
        statistics=statistics,
        current=plan,
        selector=settings,
        profile=profile,
        calibration=calibration_of(seen),
        forbidden=forbidden_of(seen, iteration),
        iterations_left=len(run.contexts) - iteration,
    )
