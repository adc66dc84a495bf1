"""On-policy distillation: a teacher takes an untrained pupil to its own win rate, rewards unseen.

The recipe `tictactoe_tiny` trains the teacher by rewards. The pupil begins with random weights, not
even warmed up on legal moves, and learns from the teacher's log-probs of the pupil's own moves
alone (`reward.environment_weight: 0`). Both then play the same held-out games.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.record import read_lines
from tools.harness import REPOSITORY, Report, Row, parser, publish

RECIPE = "tictactoe_tiny"


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--scratch", type=Path, help="directory of the runs, which are continued")
    made.add_argument("--teacher-iterations", type=int, default=40)
    made.add_argument("--pupil-iterations", type=int, default=160)
    made.add_argument("--episodes", type=int, default=1024, help="held-out games of each")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = made.parse_args()
    if options.quick:
        options.teacher_iterations, options.pupil_iterations, options.episodes = 2, 3, 64
        options.seeds = options.seeds[:1]
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="earl-distillation-"))
    scratch = scratch.resolve()
    rows = [
        row for seed in options.seeds for row in distilled(seed, scratch / f"seed_{seed}", options)
    ]
    gaps = []
    for seed in options.seeds:
        last = [row for row in rows if row["seed"] == seed and row["checkpoint"] == "last"]
        wins = {row["who"]: float(row["wins"] or 0) for row in last}
        gaps.append(wins["teacher"] - wins["pupil"])
    notes = [
        "the pupil's reward is 0 in every episode: its loss is the reverse KL to the teacher on "
        "its own episodes, and nothing else",
        "wins against a random opponent, from either side; 95 % intervals; a seed is that of the "
        "run and of both models",
        "distillation_win_gap: the teacher's wins less the pupil's, the mean of the seeds; "
        "distillation_win_gap_worst: of one seed",
    ]
    headline = {
        "distillation_win_gap": sum(gaps) / len(gaps),
        "distillation_win_gap_worst": max(gaps),
    }
    publish(Report("distillation", "On-policy distillation", rows, headline, notes), options)


def distilled(seed: int, scratch: Path, options: Any) -> list[Row]:
    """Train a teacher and a pupil, or go on with them; the games of both before and after."""
    scratch.mkdir(parents=True, exist_ok=True)
    common = [f"seed={seed}", f"runs_directory={scratch / 'runs'}", "evaluation.every=20"]
    teacher = [
        f"model.path={scratch / 'teacher'}",
        f"model.builder_options={{seed: {seed}}}",
        f"iterations={options.teacher_iterations}",
    ]
    pupil = [
        f"model.path={scratch / 'pupil'}",
        "model.builder_options="
        f"{{hidden: 128, layers: 3, warm_start_steps: 0, seed: {1000 + seed}}}",
        f"iterations={options.pupil_iterations}",
        "reward.environment_weight=0",
        "algorithm.kl={placement: loss, estimator: k2, coefficient: 1.0, reference: teacher}",
        "update.learning_rate=1e-3",
    ]
    rows: list[Row] = []
    for name, overrides in (("teacher", teacher), ("pupil", pupil)):
        earl("train", RECIPE, "--name", name, "--quiet", *settings([*common, *overrides]))
        for which in ("initial", "last"):
            row = played(scratch / "runs" / name, name, which, options.episodes)
            rows.append({"seed": seed, **row})
    return rows


def played(run: Path, who: str, checkpoint: str, episodes: int) -> Row:
    """Held-out games of a run's checkpoint."""
    told = earl("evaluate", run, "--checkpoint", checkpoint, "--episodes", episodes, "--json")
    outcomes: dict[str, Any] = json.loads(told.splitlines()[-1])["outcomes"]
    none = {"share": 0.0, "low": 0.0, "high": 0.0}
    win, illegal = (outcomes.get(name, none) for name in ("win", "illegal"))
    lines = read_lines(run / "metrics.jsonl")
    shape = read_model_shape(run.parent.parent / who)
    return {
        "who": who,
        "checkpoint": checkpoint,
        "parameters": shape.parameters,
        "iterations": len(lines) if checkpoint == "last" else 0,
        "wins": win["share"],
        "from": win["low"],
        "to": win["high"],
        "illegal": illegal["share"],
    }


def settings(overrides: list[str]) -> list[str]:
    return [part for each in overrides for part in ("--set", each)]


def earl(*arguments: object) -> str:
    """What a command prints; ends with its message where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"earl {arguments[0]} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
