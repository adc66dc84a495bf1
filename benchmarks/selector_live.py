"""The selector on this machine: every layout measured twice, then runs whose contexts grow.

Set A is what a policy may see, set B judges; the two are taken in turns. `live_regret`: what
`live_tokens` loses to the best layouts in hindsight, switches included, less what the best of set A
loses (the noise floor), as a fraction; the mean over runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.selector_live_replay import STAGES, Course, Growth, Policy, World, follow, growth
from benchmarks.selector_live_table import (
    Cell,
    LiveTable,
    every_other,
    from_a,
    from_b,
    nothing,
    whole,
)
from earl_core.deployment.stage_deployment import StageDeployment
from tools.harness import Report, Row, interval, parser, publish, shown

ITERATIONS = 36

LIVE = Policy("live_tokens", "live_tokens", whole, observes=True)
VARIANTS = (
    Policy("live_tokens, set A alone", "live_tokens", whole),
    Policy("live_tokens, set A at every other context", "live_tokens", every_other, observes=True),
    Policy("live_tokens, no profile but its own iterations", "live_tokens", nothing, observes=True),
    Policy("live_tokens, roofline alone", "live_tokens", nothing),
)


class Compared(NamedTuple):
    """One run: seconds on set B. floor: the best of set A. fixed: every pair of layouts held
    throughout, best first."""

    run: Growth
    best: Course
    floor: Course
    policies: dict[str, Course]
    fixed: list[tuple[float, StageDeployment, StageDeployment]]

    def regret(self, seconds: float) -> float:
        """Over the best in hindsight, as a fraction."""
        return seconds / self.best.total - 1

    def excess(self, name: str) -> float:
        """A policy's regret over that of the floor."""
        return self.regret(self.policies[name].total) - self.regret(self.floor.total)


def compare(table: LiveTable, run: Growth) -> Compared:
    """All policies through one run."""
    world = World(table, run)
    sizes = sorted({c.requests for c in table.of(run.engine) if c.engine})
    policies = [LIVE, *VARIANTS]
    policies += [
        Policy(f"average_context measured at {at}", "average_context", whole, at=at) for at in sizes
    ]
    return Compared(
        run,
        world.hindsight(world.judge),
        world.hindsight(world.seen),
        {policy.name: follow(world, policy) for policy in policies},
        world.fixed(),
    )


def growths(table: LiveTable, iterations: int = ITERATIONS) -> list[Growth]:
    """A run for each engine and each number of responses."""
    runs = []
    for engine in table.engines():
        contexts = table.contexts(engine)
        counts = sorted(
            {c.requests * c.candidate.replicas for c in table.cells if c.engine == engine}
        )
        runs += [growth(engine, contexts[0], contexts[-1], iterations, n) for n in counts]
    return runs


def report(table: LiveTable, iterations: int = ITERATIONS) -> Report:
    """Everything as one report."""
    made = Report("selector_live", "The selector on this machine, measured twice")
    made.rows = [row(cell) for cell in table.cells if not cell.alias]
    compared = [compare(table, run) for run in growths(table, iterations)]
    excesses = [each.excess(LIVE.name) for each in compared]
    made.headline["live_regret"] = fmean(excesses)
    made.headline["live_regret_worst_run"] = max(excesses)
    made.headline["noise_floor"] = fmean([each.regret(each.floor.total) for each in compared])
    best = [each.fixed[0][0] / each.policies[LIVE.name].total - 1 for each in compared]
    made.headline["live_ahead_of_best_fixed_worst_run"] = min(best)
    made.headline["live_ahead_of_best_fixed_of_all_runs"] = ahead_of_all(compared)
    made.notes += _method(table, iterations)
    made.notes += _noise(table)
    made.notes += _switches(table)
    for each in compared:
        made.notes += _run(each)
    made.notes += _means(compared)
    return made


def row(cell: Cell) -> Row:
    """One measured cell."""
    a, b = from_a(cell), from_b(cell)
    return {
        "stage": f"rollout, {cell.engine}" if cell.engine else "update",
        "layout": cell.candidate.label,
        "context": cell.context,
        "each": cell.requests,
        "tokens/s A": a,
        "tokens/s B": b,
        "B over A": b / a,
        "A": interval(cell.a),
        "B": interval(cell.b),
        "peak MiB": cell.peak / 2**20,
    }


def ahead_of_all(compared: Sequence[Compared]) -> float:
    """The best single choice for all runs of an engine over `live_tokens`, less one; the worst."""
    found = []
    for engine in dict.fromkeys(each.run.engine for each in compared):
        of_engine = [each for each in compared if each.run.engine == engine]
        totals: dict[tuple[StageDeployment, StageDeployment], list[float]] = {}
        for each in of_engine:
            for seconds, rollout, update in each.fixed:
                totals.setdefault((rollout, update), []).append(seconds)
        # A limit that no run has as many sequences as is offered in some of them only.
        whole_runs = [sum(t) for t in totals.values() if len(t) == len(of_engine)]
        live = sum(each.policies[LIVE.name].total for each in of_engine)
        found.append(min(whole_runs) / live - 1)
    return min(found)


def _method(table: LiveTable, iterations: int) -> list[str]:
    count = len(table.cells[0].a)
    return [
        f"Sets A and B: {count} repetitions each, in turns, layouts in turns within each; medians. "
        "Rollout: tokens/s of one engine that decodes `each` sequences whose earlier tokens are "
        "cached, all engines of the layout at work; layouts of an engine are alive at the same "
        "time. Update: tokens/s of `PolicyLearner.update` on `each` samples of `context` tokens; "
        "budgets that cut samples alike are one row.",
        f"Runs: {iterations} iterations whose contexts grow by equal factors; an iteration decodes "
        "responses x context tokens and updates on them, with the rate of set B at its context "
        "(between measured loads: logarithms, linear in octaves). Policies see contexts of "
        "finished iterations only.",
        "Not in it: reading prompts, the environment, memory running out (all layouts fit here).",
    ]


def _noise(table: LiveTable) -> list[str]:
    apart = sorted(abs(from_b(c) / from_a(c) - 1) for c in table.cells if not c.alias)
    return [
        f"A and B differ by {percent(apart[len(apart) // 2])} in the median cell and by "
        f"{percent(apart[-1])} in the worst."
    ]


def _switches(table: LiveTable) -> list[str]:
    built = ", ".join(
        f"{s.engine} {s.candidate.label} {s.start:.1f} s to start and {s.stop:.1f} s to end"
        for s in table.switches
    )
    notes = [f"Switches, each measured once: {built}."]
    if table.reshards:
        ordered = sorted(table.reshards)
        middle = shown(ordered[len(ordered) // 2])
        notes.append(
            f"A live update takes another budget or checkpointing in {middle} s ({len(ordered)} "
            f"changes, {shown(ordered[0])} to {shown(ordered[-1])} s)."
        )
    return notes


def _run(each: Compared) -> list[str]:
    run = each.run
    fixed = [seconds for seconds, _, _ in each.fixed]
    middle, worst = percent(each.regret(fixed[len(fixed) // 2])), percent(each.regret(fixed[-1]))
    _, rollout, update = each.fixed[0]
    live = each.policies[LIVE.name]
    kept = [f"{live.switches(stage)} in {stage}" for stage in STAGES]
    kept_best = [f"{each.best.switches(stage)} in {stage}" for stage in STAGES]
    lost = ", ".join(
        f"{name} {percent(each.regret(course.total))}" for name, course in each.policies.items()
    )
    return [
        f"{run.engine}, {run.responses} responses, {run.contexts[0]:.0f} to {run.contexts[-1]:.0f} "
        f"tokens: best in hindsight {each.best.total:.1f} s ({', '.join(kept_best)} switches); "
        f"regret: noise floor {percent(each.regret(each.floor.total))}, {lost}; fixed, "
        f"{len(fixed)} choices: {percent(each.regret(fixed[0]))} ({rollout.label}; {update.label}) "
        f"to {worst}, median {middle}. "
        f"live_tokens switched {', '.join(kept)} and ended {percent(fixed[0] / live.total - 1)} "
        "ahead of the best fixed choice."
    ]


def _means(compared: Sequence[Compared]) -> list[str]:
    notes = []
    for name in compared[0].policies:
        found = [each.policies.get(name) for each in compared]
        pairs = [(e, course) for e, course in zip(compared, found, strict=True) if course]
        over = fmean([each.excess(name) for each, _ in pairs])
        notes.append(f"{name}: on average {percent(over)} over the noise floor.")
    return notes


def percent(value: float) -> str:
    """Write a share, such as `1.2 %`."""
    return f"{100 * value:.1f} %"


def options() -> argparse.Namespace:
    """Command line."""
    made = parser((__doc__ or "").partition("\n")[0])
    made.add_argument("--keep", type=Path, metavar="FILE", help="write measurements, for --replay")
    made.add_argument(
        "--replay", type=Path, metavar="FILE", help="measurements that --keep wrote, not new ones"
    )
    return made.parse_args()


def measured(given: argparse.Namespace) -> LiveTable:
    """New measurements, or those of an earlier run."""
    if given.replay:
        return LiveTable.read(given.replay)
    # Not before: replaying needs no torch.
    from benchmarks.selector_live_measure import FULL, QUICK, measure

    with tempfile.TemporaryDirectory(prefix="earl-live-") as directory:
        sizes = QUICK if given.quick else FULL
        return measure(
            Path(directory),
            sizes,
            lambda line: print(line, file=sys.stderr, flush=True),
            given.keep,
        )


def main() -> None:
    """Measure, keep, replay, report."""
    given = options()
    table = measured(given)
    publish(report(table), given)


if __name__ == "__main__":
    main()
