"""Runs with a critic beside runs without one: returns, held-out wins, what values explain.

    python -m tools.critic_learning runs/grpo_0 runs/gae_0 --window 5 --markdown FILE

The runs are of one recipe and are named ARM_SEED, such as

    earl train tictactoe_tiny --name grpo_0 --set seed=0
    earl train tictactoe_tiny --name gae_0 --set seed=0 --set algorithm.advantage=gae \\
        --set 'critic={"learning_rate": 0.001, "minibatches": 8}'

Where one has gone on for longer than another, arms are compared at the last iteration that all
have.
"""

from __future__ import annotations

import math
from pathlib import Path

from earl_core.run.record import read_lines
from tasks.reports.lines import Line
from tools.harness import Report, Row, parser, publish
from tools.learning_curves import evaluations

NORMAL = 1.96


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("runs", nargs="+", type=Path, help="run directories")
    options.add_argument("--window", type=int, default=5, help="iterations of a mean")
    given = options.parse_args()
    lines: dict[str, list[Line]] = {
        run.name: read_lines(run / "metrics.jsonl") for run in given.runs
    }
    common = min(len(each) for each in lines.values())
    report = Report("critic_learning", "Learning with a critic and without")
    report.rows = [row_of(run, lines[run.name], common, given.window) for run in given.runs]
    arms: dict[str, list[tuple[float, float]]] = {}
    for run in given.runs:
        window = lines[run.name][common - given.window : common]
        arms.setdefault(run.name.rpartition("_")[0], []).append(returned(window))
    for arm, found in arms.items():
        low, high = min(m - h for m, h in found), max(m + h for m, h in found)
        mean = sum(m for m, _ in found) / len(found)
        report.headline[f"{arm}_return"] = mean
        when = f"iterations {common - given.window} to {common - 1}"
        report.notes.append(
            f"{arm}: {when} return {mean:.3f}, the mean of "
            f"{len(found)} seeds; their 95 % intervals reach from {low:.3f} to {high:.3f}."
        )
    explained = [row[f"explained variance, last {given.window}"] for row in report.rows]
    numbers = [each for each in explained if isinstance(each, float)]
    if numbers:
        report.headline["explained_variance_least"] = min(numbers)
    publish(report, given)


def returned(lines: list[Line]) -> tuple[float, float]:
    """Mean return of the episodes of these iterations, and half of its 95 % interval."""
    episodes = sum(line["rollout/episodes"] for line in lines)
    mean = sum(line["rollout/return/mean"] for line in lines) / len(lines)
    spread = sum(line["rollout/return/std"] ** 2 for line in lines) / len(lines)
    return mean, NORMAL * math.sqrt(spread / episodes)


def row_of(run: Path, lines: list[Line], common: int, window: int) -> Row:
    """What a run returned there and at its end."""
    mean, half = returned(lines[common - window : common])
    last, last_half = returned(lines[-window:])
    held = [each for each in evaluations(run) if each.policy_version][-1:]
    win = held[0].shares["win"] if held else None
    explained = [
        line["critic/explained_variance"] for line in lines if "critic/explained_variance" in line
    ]
    tail = explained[-window:]
    return {
        "run": run.name,
        f"return at {common}": f"{mean:.3f} ± {half:.3f}",
        "iterations": len(lines),
        "return, last": f"{last:.3f} ± {last_half:.3f}",
        "held-out wins": "—"
        if win is None
        else f"{100 * win[0]:.0f} ({100 * win[1]:.0f}-{100 * win[2]:.0f}) % "
        f"after {held[0].policy_version}",
        f"explained variance, last {window}": sum(tail) / len(tail) if tail else "—",
        "explained variance, last": tail[-1] if tail else "—",
    }


if __name__ == "__main__":
    main()
