"""Runs replayed on what one GPU measured: where fixed choices end, and what `live_tokens` loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.selector_live_replay import Policy, World, follow, growth
from benchmarks.selector_live_table import LiveTable
from earl_core.deployment.stage_deployment import StageDeployment


def replay(table: LiveTable, iterations: int = 24) -> tuple[dict[str, float], list[str]]:
    """Headline figures and notes of runs whose contexts grow."""
    contexts = table.contexts("torch")
    counts = sorted({cell.requests for cell in table.cells if cell.engine})
    worlds = [
        World(
            table,
            growth("torch", contexts[0], contexts[-1], iterations, count),
            fixed_fields=("update.offload_optimizer",),
            budget=min(c.candidate.max_tokens_per_microbatch for c in table.cells if not c.engine),
        )
        for count in counts
    ]
    stories = [story(world) for world in worlds]
    headline = {
        "fixed_choices_out_of_memory": sum(s.dead for s in stories) / len(stories),
        "live_tokens_out_of_memory": float(sum(s.failures for s in stories)),
        "live_regret": sum(s.excess for s in stories) / len(stories),
    }
    return headline, [s.note for s in stories]


class Story(NamedTuple):
    """The course of one run. dead: share of the fixed choices that ran out of memory. failures:
    stages that `live_tokens` had to repeat for lack of memory. excess: its regret over the noise
    floor."""

    dead: float
    failures: int
    excess: float
    note: str


def story(world: World) -> Story:
    """Fixed choices, the best in hindsight, and `live_tokens`."""
    run, fixed = world.run, world.fixed()
    dead = [(one, other) for seconds, one, other in fixed if math.isinf(seconds)]
    best, floor = world.hindsight(world.judge).total, world.hindsight(world.seen).total
    live = follow(world, Policy("live_tokens", "live_tokens", observes=True))
    seconds, one, other = fixed[0]
    held = f"the best that lasts ({one.label}; {other.label}) takes {seconds / best:.3f} times"
    if math.isinf(seconds):
        held = "none lasts; measured by"
    note = (
        f"{run.responses} responses, {run.contexts[0]:.0f} to {run.contexts[-1]:.0f} tokens: "
        f"{len(dead)} of {len(fixed)} fixed choices run out of memory{_where(world, dead)}; {held} "
        f"the best in hindsight; set A's best takes {floor / best:.3f} times that (the noise "
        f"floor), live_tokens {live.total / best:.3f}, with {live.failures} stages repeated for "
        f"lack of memory and {live.switches('rollout')} switches in rollout, "
        f"{live.switches('update')} in update."
    )
    return Story(len(dead) / len(fixed), live.failures, (live.total - floor) / best, note)


def _where(world: World, dead: Sequence[tuple[StageDeployment, StageDeployment]]) -> str:
    """The contexts at which they do, first and last."""
    found = [
        next(c for c in world.run.contexts if math.isinf(sum(world.seconds(o, c) for o in pair)))
        for pair in dead
    ]
    return f", at {min(found):,.0f} to {max(found):,.0f} tokens" if found else ""
