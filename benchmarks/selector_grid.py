"""The grid that the EARL paper printed (arXiv 2510.05943), as numbers and as a profile; policies
followed through contexts that grow from 1K to 32K, and the time that they lose.

There the truth is the grid, interpolated; a policy sees contexts of finished iterations only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from earl_core.config.rollout import RolloutConfig, VllmConfig
from earl_core.config.selector import SelectorConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, key_of

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
RESPONSES = (8, 16, 32, 64, 128)
SPEEDUP: tuple[tuple[float | None, ...], ...] = (
    (-21.1, -32.2, -30.7, -29.1, -6.9),
    (-20.0, -28.6, -26.3, -16.6, -5.5),
    (-18.0, -25.2, -21.9, -5.9, +5.1),
    (-24.7, -20.8, -4.4, +6.4, +5.2),
    (-18.8, -5.0, +3.4, +5.5, +3.1),
    (-1.5, +4.6, +5.0, +6.5, None),
)
"""Per cent from TP 4 to TP 8 in tokens per GPU and second; rows: contexts; columns: responses of
one engine. None: TP 4 ran out of memory."""

UNCERTAIN = (32768, 8)
"""Its sign is hard to read in the paper."""

MODEL, HARDWARE = MODELS["qwen2.5-72b"], cluster("h100-80gb", 1, 8)
ENGINE_SHARE = RolloutConfig.model_fields["vllm"].default.gpu_memory_utilization
SMALL, LARGE = 4, 8

Place = tuple[int, int]
Excluded = Callable[[ProfilePoint], bool]


def cells() -> Iterator[tuple[Place, float | None]]:
    """Every cell of the grid."""
    for context, line in zip(CONTEXTS, SPEEDUP, strict=True):
        for responses, value in zip(RESPONSES, line, strict=True):
            yield (context, responses), value


def certain() -> dict[Place, float]:
    """The cells whose sign counts."""
    return {place: v for place, v in cells() if v is not None and place != UNCERTAIN}


def selection(
    context: float,
    responses: int,
    profile: ProfileTable,
    *,
    policy: str = "live_tokens",
    engine_share: float = ENGINE_SHARE,
) -> SelectionInput:
    """A rollout on eight GPUs, many rounds of `responses` sequences in each engine."""
    return SelectionInput(
        iteration=0,
        rollout=RolloutConfig(
            prompts_per_iteration=64 * responses,
            group_size=1,
            max_turns=1,
            max_model_len=40960,
            max_running_requests=responses,
            vllm=VllmConfig(gpu_memory_utilization=engine_share),
        ),
        update=UpdateConfig(),
        needs_reference=False,
        hardware=HARDWARE,
        model=MODEL,
        statistics=Statistics(
            context_mean=(context,), context_max=(context,), generated_share=(1.0,)
        ),
        profile=profile,
        selector=SelectorConfig(
            policy=policy,
            stages=("rollout",),
            tensor_parallel=(SMALL, LARGE),
            fixed_fields=("rollout.max_running_requests",),
            switch_seconds=0.0,
        ),
    )


def layout(tensor: int, responses: int) -> StageDeployment:
    """The rollout of eight GPUs at this degree."""
    return StageDeployment("rollout", 8 // tensor, tensor, max_running_requests=responses)


def measured(leave_out: Excluded = lambda point: False) -> ProfileTable:
    """The grid as a profile.

    The paper prints ratios only: TP 4 gets the roofline's rate, TP 8 that times the ratio. The
    uncertain cell stays out; the cell without memory is an out-of-memory of TP 4.
    """
    guess = Predictor(selection(1024.0, 8, ProfileTable()))
    points = []
    for (context, responses), value in cells():
        place = {"context": float(context), "requests": float(responses)}
        small, large = layout(SMALL, responses), layout(LARGE, responses)
        if value is None:
            points.append(ProfilePoint(key=key_of(small), out_of_memory=True, **place))
        elif (context, responses) != UNCERTAIN:
            rate, _ = guess.rate(small, context, responses)
            faster = rate * 2 * (1 + value / 100)
            points.append(ProfilePoint(key=key_of(small), tokens_per_second=rate, **place))
            points.append(ProfilePoint(key=key_of(large), tokens_per_second=faster, **place))
    return ProfileTable(points=tuple(each for each in points if not leave_out(each)))


SWITCH_SHARE = 0.02
"""Cost of a switch in iterations at TP 4; the paper reports none."""


def truth(context: float, responses: int) -> float | None:
    """The grid's per cent at any context, linear in octaves; None: TP 4 has no memory."""
    column = RESPONSES.index(responses)
    place = min(max(math.log2(context / CONTEXTS[0]), 0.0), len(CONTEXTS) - 1.0)
    below = min(int(place), len(CONTEXTS) - 2)
    low, high = SPEEDUP[below][column], SPEEDUP[below + 1][column]
    share = place - below
    if high is None or low is None:
        # Memory ends somewhere between the last two contexts; halfway in octaves is assumed.
        return low if share < 0.5 else None
    return low + share * (high - low)


def seconds_of(tensor: int, context: float, responses: int) -> float:
    """An iteration's rollout, in rollouts at TP 4; infinite where TP 4 has no memory."""
    value = truth(context, responses)
    if tensor == SMALL:
        return math.inf if value is None else 1.0
    return 1.0 / (1.0 + (value or 0.0) / 100) if value is not None else 0.95


def best_schedule(contexts: Sequence[float], responses: int) -> float:
    """Least time of any sequence of degrees in hindsight, switches included."""
    cost = dict.fromkeys((SMALL, LARGE), 0.0)
    for number, context in enumerate(contexts):
        cost = {
            tensor: seconds_of(tensor, context, responses)
            + min(
                cost[before] + (SWITCH_SHARE if before != tensor and number else 0.0)
                for before in cost
            )
            for tensor in cost
        }
    return min(cost.values())


class Outcome(NamedTuple):
    """A policy's time over a growth, in rollouts at TP 4, and how often it ran out of memory."""

    seconds: float
    failures: int
    switches: int


Chooser = Callable[[int, Sequence[float], DeploymentPlan | None], DeploymentPlan | int]


def follow(choose_next: Chooser, contexts: Sequence[float], responses: int) -> Outcome:
    """Run a policy: it sees contexts of earlier iterations only. One that runs out of memory loses
    a whole rollout, then plays it at TP 8."""
    total, failures, switches = 0.0, 0, 0
    before: int | None = None
    plan: DeploymentPlan | None = None
    for number, context in enumerate(contexts):
        answer = choose_next(number, contexts[:number] or contexts[:1], plan)
        if isinstance(answer, DeploymentPlan):
            plan, tensor = answer, answer["rollout"].tensor_parallel
        else:
            tensor = answer
        if before is not None and before != tensor:
            total, switches = total + SWITCH_SHARE, switches + 1
        before = tensor
        taken = seconds_of(tensor, context, responses)
        if math.isinf(taken):
            failures += 1
            taken = 1.0 + SWITCH_SHARE + seconds_of(LARGE, context, responses)
        total += taken
    return Outcome(total, failures, switches)


def chooser(policy: str, responses: int, profile: ProfileTable, at: int | None = None) -> Chooser:
    """A policy of the selector. at: responses at which `average_context` was measured."""

    def choose_next(
        number: int, seen: Sequence[float], plan: DeploymentPlan | None
    ) -> DeploymentPlan:
        given = selection(seen[-1], responses, profile, policy=policy)
        settings = given.selector
        if policy == "average_context":
            settings = SelectorConfig(
                policy=policy,
                tensor_parallel=settings.tensor_parallel,
                profiled_requests=at,
                fixed_fields=settings.fixed_fields,
            )
        means = tuple(float(value) for value in seen[-8:])
        given = given.model_copy(
            update={
                "iteration": number,
                "current": plan,
                "selector": settings,
                "statistics": Statistics(
                    context_mean=means, context_max=means, generated_share=(1.0,)
                ),
            }
        )
        return select(given)

    return choose_next


def growth(steps: int) -> list[float]:
    """Contexts from 1K to 32K in equal octaves."""
    return [1024 * 32 ** (step / (steps - 1)) for step in range(steps)]


def regrets(steps: int) -> Iterator[tuple[str, list[float], int, int]]:
    """Each policy's lost time over the oracle's as a share, for each number of responses; failures
    and switches in all."""
    contexts, profile = growth(steps), measured()
    policies: list[tuple[str, Callable[[int], Chooser]]] = [
        ("fixed TP 4", lambda responses: lambda number, seen, plan: SMALL),
        ("fixed TP 8", lambda responses: lambda number, seen, plan: LARGE),
    ]
    for at in RESPONSES:
        policies.append(
            (
                f"average_context measured at {at}",
                lambda r, at=at: chooser("average_context", r, profile, at),
            )
        )
    policies += [
        (
            "average_context measured at the run's own",
            lambda r: chooser("average_context", r, profile, r),
        ),
        ("live_tokens, grid as profile", lambda r: chooser("live_tokens", r, profile)),
        ("live_tokens, roofline only", lambda r: chooser("live_tokens", r, ProfileTable())),
    ]
    for name, make in policies:
        outcomes = [follow(make(responses), contexts, responses) for responses in RESPONSES]
        lost = [
            outcome.seconds / best_schedule(contexts, responses) - 1
            for outcome, responses in zip(outcomes, RESPONSES, strict=True)
        ]
        yield name, lost, sum(o.failures for o in outcomes), sum(o.switches for o in outcomes)
