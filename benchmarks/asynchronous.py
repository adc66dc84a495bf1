"""Iterations that overlap: seconds of an iteration with and without, on a game that is waited for.

    python -m benchmarks.asynchronous --markdown benchmarks/results/asynchronous.md

The environment waits before each answer, as tools do, about as long in a rollout as training takes.
All arms have one thread for the engine and one for the learner. `synchronous` has `staleness` 0;
`in turn` has staleness 1 and nothing beside anything (`colocated`); `side by side` has staleness 1
under `shared`. The limit is what the longer of the two sides takes by the times of `synchronous`:
its speed-up is (rollout + rest) / max(rollout, rest). All times come from the files of the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earl_core.environments.base import Message, StepResult
from earl_core.environments.games.board_game import BoardGameOptions, BoardRewards
from earl_core.environments.games.tic_tac_toe import TicTacToe
from earl_core.run.record import read_lines
from tools.harness import REPOSITORY, Report, Row, median, parser, publish
from tools.process_tree import train as run_train

_FIRST = 2
"""The first measured iteration; workers start in those before."""

ARMS: dict[str, Sequence[str]] = {
    "synchronous": ("schedule.staleness=0",),
    "in turn": ("schedule.staleness=1",),
    "side by side": ("schedule.staleness=1", "stages.placement=shared"),
}

_RUN = (
    "environment.name=benchmarks.asynchronous:WaitingTicTacToe",
    "algorithm.importance_correction={}",
    "rollout.threads=1",
    "update.threads=1",
    "evaluation.every=0",
    "checkpoint.every=1",
    "tracking.enabled=false",
)


class WaitingTicTacToe:
    """Tic-tac-toe whose every move is waited for. seconds: how long. style, opponent, agent_side,
    illegal_action, rewards: as of the game."""

    def __init__(self, seconds: float = 0.0, **options: Any) -> None:
        rewards = BoardRewards(**options.pop("rewards", {}))
        self._game = TicTacToe(BoardGameOptions(rewards=rewards, **options))
        self._seconds = seconds
        self.characters = self._game.characters

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Begin a game."""
        return self._game.reset(prompt, seed)

    async def step(self, text: str) -> StepResult:
        """Wait, then move."""
        await asyncio.sleep(self._seconds)
        return self._game.step(text)

    def close(self) -> None:
        """End the game."""
        self._game.close()


def main() -> None:
    options = _options()
    report = Report("asynchronous", "Seconds of an iteration when rollouts overlap with updates")
    with tempfile.TemporaryDirectory(prefix="earl-asynchronous-") as name:
        found = {arm: train(arm, options, Path(name)) for arm in ARMS}
    possible = fill(report, found)
    fastest = _seconds(found["synchronous"]) / _seconds(found["side by side"])
    report.headline["overlap_speedup"] = fastest
    report.headline["overlap_efficiency"] = (fastest - 1) / (possible - 1)
    report.notes.append(
        f"Moves wait {options.wait:g} s. overlap_efficiency is the gain over the possible one: "
        "(speed-up - 1) / (possible speed-up - 1)."
    )
    publish(report, options)


def train(arm: str, options: argparse.Namespace, scratch: Path) -> list[dict[str, float]]:
    """Run one arm; the lines of its measured iterations, and the one before them."""
    iterations = _FIRST + (4 if options.quick else 10)
    name = arm.replace(" ", "-")
    settings = [
        f"name={name}",
        f"runs_directory={scratch / 'runs'}",
        f"model.path={scratch / 'model'}",
        f"environment.options.seconds={options.wait}",
        f"rollout.prompts_per_iteration={options.prompts}",
        f"iterations={iterations}",
        *_RUN,
        *ARMS[arm],
    ]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    run_train("tictactoe_tiny", settings, scratch, log=f"{name}.log", environment=environment)
    written = read_lines(scratch / "runs" / name / "metrics.jsonl")
    lines = {int(line["iteration"]): line for line in written}
    return [lines[number] for number in range(_FIRST - 1, iterations)]


def _seconds(lines: Sequence[dict[str, float]]) -> float:
    """Seconds of an iteration, over all that were measured."""
    return (lines[-1]["time"] - lines[0]["time"]) / (len(lines) - 1)


def fill(report: Report, found: dict[str, list[dict[str, float]]]) -> float:
    """A row for each arm and one for the limit; the possible speed-up."""
    whole = _seconds(found["synchronous"])
    played = median([line["rollout/stage_seconds"] for line in found["synchronous"][1:]])
    possible = whole / max(played, whole - played)
    for arm, lines in found.items():
        rollout = median([line["rollout/stage_seconds"] for line in lines[1:]])
        update = median([line["update/stage_seconds"] for line in lines[1:]])
        row: Row = {
            "": arm,
            "seconds of an iteration": _seconds(lines),
            "rollout": rollout,
            "update": update,
            "speed-up": whole / _seconds(lines),
        }
        report.rows.append(row)
    report.rows.append(
        {"": "limit", "seconds of an iteration": whole / possible, "speed-up": possible}
    )
    return possible


def _options() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--wait", type=float, default=1.0, help="seconds before each answer")
    made.add_argument("--prompts", type=int, default=64, help="prompts of an iteration")
    return made.parse_args()


if __name__ == "__main__":
    main()
