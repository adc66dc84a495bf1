"""Learning curves of one or more runs: held-out evaluations with 95 % intervals, as a picture.

`python -m tools.learning_curves runs/demo_0 runs/demo_1 --png FILE --markdown FILE`
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earl_core.run.record import read_lines
from tools.harness import Report, Row, parser, publish

OUTCOMES = ("win", "draw", "loss", "illegal")
_COLOURS = {"win": "#2a7f3f", "draw": "#888888", "loss": "#b8860b", "illegal": "#b03030"}


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
    for path in sorted((run / "iterations").glob("*/evaluation.json")):
        metrics = json.loads(path.read_text())["metrics"]
        shares = {name: _interval(metrics, f"outcome/{name}") for name in OUTCOMES}
        found.append(Evaluation(int(path.parent.name), int(metrics["episodes"]), shares))
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


def draw(runs: list[Path], target: Path) -> None:
    """One panel per run: training as dots, held-out evaluations as lines with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(runs), figsize=(1.2 + 4.3 * len(runs), 3.6), sharey=True, squeeze=False
    )
    for axis, run in zip(axes[0], runs, strict=True):
        _panel(axis, run)
    axes[0][0].set_ylabel("share of games, %")
    axes[0][-1].legend(loc="upper right", fontsize=8, frameon=False)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def _panel(axis: Any, run: Path) -> None:
    found = evaluations(run)
    training = read_lines(run / "metrics.jsonl")
    versions = [evaluation.policy_version for evaluation in found]
    for name in ("win", "loss", "illegal"):
        share, low, high = (
            [100 * evaluation.shares[name][part] for evaluation in found] for part in range(3)
        )
        axis.plot(versions, share, "o-", color=_COLOURS[name], label=f"{name} (held out)")
        axis.fill_between(versions, low, high, color=_COLOURS[name], alpha=0.15, linewidth=0)
        axis.plot(
            [line["iteration"] for line in training],
            [100 * line.get(f"rollout/outcome/{name}", 0.0) for line in training],
            ".",
            color=_COLOURS[name],
            alpha=0.35,
        )
    axis.set_title(f"{run.name} ({minutes(run):.1f} min)", fontsize=10)
    axis.set_xlabel("iteration")
    axis.set_ylim(0, 100)
    axis.grid(alpha=0.25)


def main() -> None:
    """Table and picture of the runs named on the command line."""
    options = parser(__doc__ or "")
    options.add_argument("runs", nargs="+", type=Path, help="run directories")
    options.add_argument("--png", type=Path, help="draw the curves into this file")
    given = options.parse_args()
    report = Report("learning_curves", "Held-out evaluations, 95 % intervals")
    for run in given.runs:
        report.rows += rows_of(run)
        last = evaluations(run)[-1]
        report.headline[f"{run.name}_win"] = last.shares["win"][0]
        report.headline[f"{run.name}_legal"] = last.legal
        report.notes.append(f"{run.name}: {minutes(run):.1f} minutes, evaluations included.")
    if given.png:
        draw(given.runs, given.png)
    publish(report, given)


if __name__ == "__main__":
    main()
