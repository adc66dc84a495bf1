"""The guard's cost: seconds of an iteration with a guard that warns, over those without one.

Pairs of runs of the smallest recipe, one after the other, begun with either in turn. Both runs of a
pair have the same seed and so do the same work. The recipe's iterations are short, so that the
share is larger than in any real run. The alternative is the run without a guard, the limit 1.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.distillation import RECIPE
from earl_core.run.record import read_lines
from tools.harness import Report, interval, parser, publish
from tools.iterations import read_iterations
from tools.process_tree import train

GUARDS = ("off", "warn")


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--pairs", type=int, default=6)
    made.add_argument("--iterations", type=int, default=24)
    options = made.parse_args()
    if options.quick:
        options.pairs, options.iterations = 1, 8
    report = Report("guard_cost", "Seconds of an iteration, with a guard and without")
    with tempfile.TemporaryDirectory(prefix="earl-guard-cost-") as name:
        _fill(report, Path(name), options)
    publish(report, options)


def _fill(report: Report, scratch: Path, options: Any) -> None:
    """Give the report a row for each pair, and the number over all of them."""
    seconds: dict[str, list[float]] = {guard: [] for guard in GUARDS}
    for pair in range(options.pairs):
        order = GUARDS if pair % 2 == 0 else GUARDS[::-1]
        runs = {guard: _run(guard, pair, scratch, options) for guard in order}
        _must_be_equal(runs["off"], runs["warn"])
        for guard, run in runs.items():
            quick, *_ = statistics.quantiles([each.wall for each in read_iterations(run)])
            seconds[guard].append(quick)
        off, warn = seconds["off"][-1], seconds["warn"][-1]
        report.rows.append({"seed": pair, "off s": off, "warn s": warn, "warn / off": warn / off})
    ratios = [warn / off for off, warn in zip(seconds["off"], seconds["warn"], strict=True)]
    report.headline["guard_cost"] = statistics.median(ratios)
    report.notes.append(
        f"warn / off over the pairs: {interval(ratios)}. Lower quartiles of "
        f"{options.iterations - 1} iterations each, as other programs disturb medians more; the "
        "first of a run is left out."
    )


def _run(guard: str, pair: int, scratch: Path, options: Any) -> Path:
    name = f"{guard}_{pair}"
    settings = (
        f"name={name}",
        f"seed={pair}",
        f"guard={guard}",
        f"runs_directory={scratch / 'runs'}",
        f"model.path={scratch / 'model'}",
        f"iterations={options.iterations}",
        "evaluation.every=0",
        "tracking.enabled=false",
    )
    train(RECIPE, settings, scratch)
    return scratch / "runs" / name


def _must_be_equal(off: Path, warn: Path) -> None:
    """A guard that only warns changes nothing; otherwise the two runs did different work."""
    returns = [
        [line["reward/mean"] for line in read_lines(run / "metrics.jsonl")] for run in (off, warn)
    ]
    if returns[0] != returns[1]:
        raise SystemExit(f"the runs {off.name} and {warn.name} differ: {returns}")


if __name__ == "__main__":
    main()
