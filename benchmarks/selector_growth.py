"""Policies followed through contexts that grow from 1K to 32K, and the time that they lose.

The truth is the printed grid, interpolated; a policy sees contexts of finished iterations only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.selector_grid import CONTEXTS, LARGE, RESPONSES, SMALL, SPEEDUP, measured, selection
from earl_core.config.selector import SelectorConfig
from earl_core.deployment.plan import DeploymentPlan
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import Statistics
from earl_core.selector.profile.profile_table import ProfileTable

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
