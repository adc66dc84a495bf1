"""Groups that score alike: kept, dropped or replaced, where four of five prompts are hopeless.

    python -m benchmarks.alike_groups --markdown benchmarks/results/alike_groups.md

A small model learns tic-tac-toe from prompts of which one in five is a game and the others pay the
same whatever is played. All arms have the same seeds and the same model. Their return is that of
held-out episodes, all of them games; what counts is how many iterations, and how many seconds of
their stages, an arm takes until the mean of two evaluations in a row has reached a return.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from earl_core.dispatch import read_manifest
from earl_core.environments.base import Message, StepResult
from earl_core.environments.registry import create
from earl_core.run.record import read_lines
from tools.harness import REPOSITORY, Report, Row, interval, median, parser, publish
from tools.process_tree import TIMEOUT_SECONDS, train_command


class MostlyHopeless:
    """Of every `of` prompts one is a game; in the others each episode ends with `lost`.

    characters, legal_answers: as for the game, for the small model.
    """

    def __init__(self, of: int = 5, lost: float = -1.0) -> None:
        game: Any = create("tic_tac_toe", {"style": "compact"})
        self._game, self.characters = game, game.characters
        self._of, self._lost, self._hopeless = of, lost, False

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._hopeless = prompt % self._of != 0
        return self._game.reset(prompt, seed)

    def step(self, text: str) -> StepResult:
        result = self._game.step(text)
        if not self._hopeless:
            return result
        return replace(result, reward=self._lost if result.done else 0.0)

    def legal_answers(self) -> list[str]:
        """Moves that are free."""
        found: list[str] = self._game.legal_answers()
        return found

    def close(self) -> None:
        self._game.close()


ARMS = ("keep", "drop", "replace")
_GAME = "benchmarks.alike_groups:MostlyHopeless"
_EVERY = 2
_STAGES = ("rollout/seconds", "reward/seconds", "advantage/seconds", "update/seconds")
_BUILD = (
    "import pathlib, sys; from earl_core.models.tiny import build; "
    "build(pathlib.Path(sys.argv[1]), environments=[{'name': sys.argv[2]}], hidden=64, layers=2, "
    "warm_start_steps=60, warm_start_learning_rate=1e-2)"
)


@dataclass(frozen=True)
class Finished:
    """A run. lines: its metrics, iteration by iteration. held_out: mean return of the held-out
    episodes by the number of iterations before."""

    arm: str
    seed: int
    lines: list[dict[str, Any]]
    held_out: dict[int, float]

    def iterations_to(self, wanted: float) -> int | None:
        """Iterations after which the return is reached; None: it is not."""
        evaluated = sorted(self.held_out.items())
        for (_, before), (iterations, now) in pairwise(evaluated):
            if (before + now) / 2 >= wanted:
                return iterations
        return None

    def seconds(self, iterations: int) -> float:
        """Seconds of the stages of the first so many iterations, without the start of workers."""
        return sum(line.get(name, 0.0) for line in self.lines[:iterations] for name in _STAGES)

    def mean(self, name: str) -> float:
        """Mean of a metric over the iterations; 0 where it is not counted."""
        return sum(line.get(name, 0.0) for line in self.lines) / len(self.lines)

    @property
    def last(self) -> float:
        """Mean of the last two evaluations."""
        return sum(sorted(self.held_out.items())[n][1] for n in (-1, -2)) / 2


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="earl-alike-groups-") as directory:
        place = Path(directory)
        command = [sys.executable, "-c", _BUILD, str(place / "model"), _GAME]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        runs = [train(place, arm, seed, options) for seed in range(options.seeds) for arm in ARMS]
    publish(report(runs, options), options)


def train(place: Path, arm: str, seed: int, options: argparse.Namespace) -> Finished:
    """One run, by `earl train` in processes of its own."""
    name = f"{arm}-{seed}"
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(_settings(place, name, arm, seed, options)), encoding="utf-8")
    with (place / f"{name}.log").open("wb") as log:
        subprocess.run(
            train_command(file, (), "--json"),
            cwd=REPOSITORY,
            check=True,
            stdout=log,
            stderr=log,
            timeout=TIMEOUT_SECONDS,
        )
    run = place / "runs" / name
    evaluated = [read_manifest(each) for each in run.glob("iterations/*/evaluation.json")]
    held_out = {each.iteration: each.metrics["return/mean"] for each in evaluated}
    return Finished(arm, seed, read_lines(run / "metrics.jsonl"), held_out)


def _settings(
    place: Path, name: str, arm: str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    return {
        "name": name,
        "seed": seed,
        "iterations": options.iterations,
        "runs_directory": str(place / "runs"),
        "model": {"path": str(place / "model")},
        "environment": {"name": _GAME},
        "rollout": {
            "engine": "torch", "prompts_per_iteration": 10, "group_size": 8, "max_turns": 5,
            "max_tokens_per_turn": 2, "dtype": "float32", "alike_groups": arm,
        },
        "update": {"precision": "fp32", "learning_rate": 1e-3},
        "evaluation": {"every": _EVERY, "episodes": 128, "options": {"of": 1}},
        "checkpoint": {"every": 10},
        "tracking": {"enabled": False, "keep_episodes": "none"},
        "dispatch": {"directory": str(place / "shm")},
    }  # fmt: skip


def report(runs: list[Finished], options: argparse.Namespace) -> Report:
    """A row for each arm; the headlines compare with `keep`."""
    found = Report("alike_groups", "Groups that score alike: keep, drop, replace")
    rows = {arm: _row([run for run in runs if run.arm == arm], options.wanted) for arm in ARMS}
    found.rows += rows.values()
    kept = rows["keep"]
    for arm in ARMS[1:]:
        for what in ("iterations", "seconds"):
            mine, theirs = rows[arm][f"{what} to it"], kept[f"{what} to it"]
            if isinstance(mine, int | float) and isinstance(theirs, int | float):
                found.headline[f"{arm}_{what}_share_of_keep"] = mine / theirs
    found.notes += [
        f"{options.seeds} seed(s), {options.iterations} iterations of 10 prompts of 8 episodes; "
        f"held-out: 128 games every {_EVERY} iterations. It: a return of {options.wanted:g} as "
        "the mean of two evaluations in a row. Medians over the seeds that reach it.",
        "Seconds: of rollout, reward, advantage and update, by their own clocks; evaluations and "
        "the start of workers are not in them. Episodes: played, of an iteration.",
        "keep skips the update of samples without advantage (update.zero_advantage), so that "
        "alike groups cost it their rollout and their place in the denominators.",
    ]
    if options.quick:
        found.notes.append("--quick: one seed, few iterations; a rough number.")
    return found


def _row(runs: list[Finished], wanted: float) -> Row:
    reached = [(run, n) for run in runs if (n := run.iterations_to(wanted)) is not None]
    seconds = [run.seconds(iterations) for run, iterations in reached]
    return {
        "alike_groups": runs[0].arm,
        "reached it": f"{len(reached)} of {len(runs)}",
        "iterations to it": median([float(n) for _, n in reached]) if reached else None,
        "seconds to it": median(seconds) if reached else None,
        "range": interval(seconds) if reached else None,
        "s/iteration": median([run.seconds(len(run.lines)) / len(run.lines) for run in runs]),
        "waves": median([run.mean("rollout/waves") for run in runs]),
        "episodes": median([run.mean("rollout/episodes") for run in runs]),
        "episodes trained on": median([run.mean("advantage/episodes_kept") for run in runs]),
        "last held-out return": median([run.last for run in runs]),
    }


def _options() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--iterations", type=int, default=40)
    made.add_argument("--wanted", type=float, default=-0.3, help="the held-out return")
    options = made.parse_args()
    if options.quick:
        options.seeds, options.iterations = 1, 6
    return options


if __name__ == "__main__":
    main()
