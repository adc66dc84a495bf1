"""Learning curves of one or more runs: held-out evaluations with 95 % intervals, as a picture.

`python -m tools.learning_curves runs/demo_0 runs/demo_1 --svg FILE --markdown FILE`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from earl_core.run.checkpoints import evaluated
from earl_core.run.record import read_lines
from tasks.reports.chart import Curve, chart
from tools.harness import Report, Row, parser, publish

OUTCOMES = ("win", "draw", "loss", "illegal")
_SEED = re.compile(r"_(seed_)?\d+$")


@dataclass(frozen=True)
class Evaluation:
    """A held-out evaluation: policy version, episodes, and (share, low, high) by outcome."""

    policy_version: int
    episodes: int
    shares: dict[str, tuple[float, float, float]]

    @property
    def legal(self) -> float:
        """Share of episodes without an illegal answer."""
        return 1.0 - self.shares["illegal"][0]


def evaluations(run: Path) -> list[Evaluation]:
    """Every sealed evaluation of a run, ascending by policy version."""
    found = []
    for sealed in evaluated(run):
        shares = {name: _interval(sealed.metrics, f"outcome/{name}") for name in OUTCOMES}
        found.append(Evaluation(sealed.iteration, int(sealed.metrics["episodes"]), shares))
    return found


def _interval(metrics: dict[str, float], name: str) -> tuple[float, float, float]:
    share, low, high = (metrics.get(f"{name}/{part}", 0.0) for part in ("share", "low", "high"))
    return share, low, high


def minutes(run: Path) -> float:
    """Wall time from the run's first ledger line to its last, in minutes."""
    lines = read_lines(run / "ledger.jsonl")
    return (lines[-1]["time"] - lines[0]["time"]) / 60 if lines else 0.0


def rows_of(run: Path) -> list[Row]:
    """A row for each evaluation, shares in percent with their interval."""
    rows: list[Row] = []
    for evaluation in evaluations(run):
        row: Row = {
            "run": run.name,
            "iterations": evaluation.policy_version,
            "games": evaluation.episodes,
        }
        for name, (share, low, high) in evaluation.shares.items():
            row[f"{name} %"] = f"{100 * share:.0f} ({100 * low:.0f}-{100 * high:.0f})"
        row["legal %"] = round(100 * evaluation.legal, 1)
        rows.append(row)
    return rows


def draw(runs: Sequence[Path], metric: str, title: str) -> str:
    """SVG: a curve for each group of runs, which are seeds of one setting and whose names differ in
    their last number: the mean of the metric, in percent, over those that were evaluated there."""
    groups: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        group = groups.setdefault(_SEED.sub("", run.name), {})
        for sealed in evaluated(run):
            # An outcome that no episode had is not among the metrics.
            value = sealed.metrics.get(metric, 0.0)
            group.setdefault(sealed.iteration, []).append(100 * value)
    curves = [
        Curve(name, [(float(x), sum(ys) / len(ys)) for x, ys in sorted(found.items())])
        for name, found in groups.items()
    ]
    return chart(title, "%", curves, within=(0, 100))


def main() -> None:
    """Table and picture of the runs named on the command line."""
    options = parser(__doc__ or "")
    options.add_argument("runs", nargs="+", type=Path, help="run directories")
    options.add_argument("--svg", type=Path, help="draw the curves into this file")
    options.add_argument("--metric", default="outcome/win/share", help="a share, which is drawn")
    options.add_argument("--title", default="Wins in held-out games")
    given = options.parse_args()
    report = Report("learning_curves", "Held-out evaluations, 95 % intervals")
    for run in given.runs:
        report.rows += rows_of(run)
        last = evaluations(run)[-1]
        report.headline[f"{run.name}_win"] = last.shares["win"][0]
        report.headline[f"{run.name}_legal"] = last.legal
        report.notes.append(f"{run.name}: {minutes(run):.1f} minutes, evaluations included.")
    if given.svg:
        given.svg.write_text(draw(given.runs, given.metric, given.title))
    publish(report, given)


if __name__ == "__main__":
    main()
