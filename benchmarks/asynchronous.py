"""Iterations that overlap, and groups that go on: seconds of an iteration with and without.

    python -m benchmarks.asynchronous --markdown benchmarks/results/asynchronous.md

**Overlap**: the environment waits before each answer, as tools do, about as long in a rollout as
training takes. All arms have one thread for the engine and one for the learner. `synchronous` has
`staleness` 0; `in turn` has staleness 1 and nothing beside anything (`colocated`); `side by side`
has staleness 1 under `shared`. The limit is what the longer of the two sides takes by the times of
`synchronous`: its speed-up is (rollout + rest) / max(rollout, rest).

**Carry-over**: one vLLM engine that takes turns with the learner plays episodes whose numbers of
turns are log-normal, so that a rollout's end is a few long ones. `synchronous` waits for them;
`stream s` lets them go on under newer weights. The engine has room for one batch in all arms.

**Never slower**: the recipe `demo` as it is, and under the selector with staleness 1 allowed, which
may lay it out in turn or divide the cores, and knows nothing of the machine when it begins. The
runs alternate, and the middle one of the ratios of all pairs counts, so that what else the machine
does weighs on both.

All times come from the files of the runs, and include a start and an end of each stage.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.environments.base import Message, StepResult
from earl_core.environments.games.board_game import BoardGameOptions, BoardRewards
from earl_core.environments.games.tic_tac_toe import TicTacToe
from earl_core.run.record import read_lines
from tools.harness import REPOSITORY, Report, Row, median, parser, publish
from tools.process_tree import train as run_train

Lines = list[dict[str, float]]

_FIRST = 2
"""The first measured iteration; workers start in those before."""

_RUN = (
    "algorithm.importance_correction={}",
    "evaluation.every=0",
    "checkpoint.every=1",
    "tracking.enabled=false",
)
_OVERLAP = (
    "environment.name=benchmarks.asynchronous:WaitingTicTacToe",
    "rollout.threads=1",
    "update.threads=1",
    # Nothing is learnt, because games of a policy that learns faster are longer.
    "update.learning_rate=1e-9",
    "update.epochs=4",
)
_TAIL = (
    "environment={name: benchmarks.asynchronous:LongTail}",
    "model.builder_options={heads: 1, hidden: 64}",
    "rollout.engine=vllm",
    "rollout.vllm.kv_cache_gib=1",
    "rollout.max_tokens_per_turn=16",
)
_SELECTOR = ("checkpoint.every=100",)


class Arm(NamedTuple):
    """One way to run. part: arms of a part are compared. settings: what it adds to the part's."""

    part: str
    name: str
    settings: Sequence[str]


ARMS = (
    Arm("overlap", "synchronous", ()),
    Arm("overlap", "in turn", ("schedule.staleness=1",)),
    Arm("overlap", "side by side", ("schedule.staleness=1", "stages.placement=shared")),
    Arm("carry-over", "synchronous", ()),
    *(
        Arm("carry-over", f"stream {s}", (f"schedule.staleness={s}", "schedule.mode=stream"))
        for s in (1, 2, 4)
    ),
    Arm("never-slower", "synchronous", ()),
    Arm("never-slower", "allowed", ("schedule.staleness=1", "selector.policy=live_tokens")),
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


class LongTail:
    """An episode of a log-normal number of turns, which the seed decides and no answer changes;
    the reward is the share of even digits in the last answer. turns: the median. spread: the
    standard deviation of the logarithm. most: turns of the longest episode."""

    characters = "0123456789"

    def __init__(self, turns: float = 4.0, spread: float = 1.0, most: int = 100) -> None:
        self._median, self._spread, self._most = turns, spread, most
        self._left = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Draw the length."""
        drawn = math.exp(random.Random(seed).gauss(math.log(self._median), self._spread))
        self._left = max(1, min(self._most, round(drawn)))
        return [Message(role="user", content=f"{prompt:04d}")]

    def step(self, text: str) -> StepResult:
        """Go on, or end."""
        self._left -= 1
        if self._left:
            return StepResult([Message(role="user", content="0")], 0.0, False)
        return StepResult([], sum(each in "02468" for each in text) / max(1, len(text)), True)

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    options = _options()
    report = Report("asynchronous", "Seconds of an iteration with and without staleness")
    arms = [arm for arm in ARMS if arm.part in options.parts]
    with tempfile.TemporaryDirectory(prefix="earl-asynchronous-") as name:
        scratch = options.keep or Path(name)
        single = [arm for arm in arms if arm.part != "never-slower"]
        found = {arm: train(arm, options, scratch) for arm in single}
        pairs = [
            {arm: train(arm, options, scratch, pair) for arm in arms if arm not in single}
            for pair in range(_pairs(options))
        ]
    for part in options.parts:
        if part == "never-slower":
            compare(report, pairs)
        else:
            fill(report, part, {arm: lines for arm, lines in found.items() if arm.part == part})
    report.notes += [
        f"overlap: moves wait {options.wait:g} s. overlap_efficiency is the gain over the possible "
        "one: (speed-up - 1) / (possible speed-up - 1).",
        f"carry-over: {options.groups} groups of 8 a batch, which is what the engine has room for; "
        f"turns of an episode have the median {options.turns:g} and the spread 1, 100 at most. "
        "carry_over_speedup is of `stream 1`.",
        f"never-slower: {_recipe(options)}, {_pairs(options)} pairs of runs. async_never_slower is "
        "seconds of `synchronous` over those of `allowed`.",
        f"{_measured(options)} iterations of each arm are measured, from number {_FIRST} on.",
    ]
    publish(report, options)


def _measured(options: argparse.Namespace) -> int:
    measured: int = 4 if options.quick else options.iterations
    return measured


def _pairs(options: argparse.Namespace) -> int:
    pairs: int = 1 if options.quick else options.pairs
    return pairs


def _recipe(options: argparse.Namespace) -> str:
    """The recipe of the part `never-slower`: SmolLM2's iterations take half a minute."""
    return "tictactoe_tiny" if options.quick else "demo"


def train(arm: Arm, options: argparse.Namespace, scratch: Path, pair: int = 0) -> Lines:
    """Run one arm; the lines of its measured iterations, and the one before them."""
    iterations = _FIRST + _measured(options)
    name = f"{arm.part}-{arm.name}-{pair}".replace(" ", "-")
    part: Mapping[str, Sequence[str]] = {
        "overlap": _OVERLAP,
        "carry-over": _TAIL,
        "never-slower": (),
    }
    recipe = _recipe(options) if arm.part == "never-slower" else "tictactoe_tiny"
    sizes: Mapping[str, Sequence[str]] = {
        "overlap": (
            f"environment.options.seconds={options.wait}",
            f"rollout.prompts_per_iteration={options.prompts}",
        ),
        "carry-over": (
            f"environment.options.turns={options.turns}",
            f"rollout.prompts_per_iteration={options.groups}",
            f"rollout.max_running_requests={8 * options.groups}",
            "rollout.max_turns=100",
        ),
        "never-slower": (
            f"selector.profile_directory={scratch / 'profiles' / name}",
            *(("rollout.prompts_per_iteration=8",) if options.quick else ()),
        ),
    }
    settings = [
        f"name={name}",
        f"runs_directory={scratch / 'runs'}",
        f"model.path={scratch / arm.part}",
        f"iterations={iterations}",
        *part[arm.part],
        *sizes[arm.part],
        *_RUN,
        *(_SELECTOR if arm.part == "never-slower" else ()),
        *arm.settings,
    ]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    run_train(recipe, settings, scratch, log=f"{name}.log", environment=environment)
    written = read_lines(scratch / "runs" / name / "metrics.jsonl")
    lines = {int(line["iteration"]): line for line in written}
    return [lines[number] for number in range(_FIRST - 1, iterations)]


def _seconds(lines: Sequence[dict[str, float]]) -> float:
    """Seconds of an iteration, over all that were measured."""
    return (lines[-1]["time"] - lines[0]["time"]) / (len(lines) - 1)


def compare(report: Report, pairs: Sequence[Mapping[Arm, Lines]]) -> None:
    """A row for each run of the part `never-slower`, and its headline."""
    ratios = []
    for number, pair in enumerate(pairs):
        whole, allowed = (_seconds(lines) for lines in pair.values())
        ratios.append(whole / allowed)
        for arm, lines in pair.items():
            _row(report, arm, f"{arm.name} ({number + 1})", lines, whole)
    report.headline["async_never_slower"] = median(ratios)


def _row(report: Report, arm: Arm, name: str, lines: Lines, whole: float) -> Row:
    """Add the row of a run, and return it. whole: seconds of an iteration of `synchronous`."""
    seconds = _seconds(lines)
    row: Row = {"": arm.part, "arm": name, "seconds of an iteration": seconds}
    for stage in ("rollout", "collect", "update"):
        times = [line[f"{stage}/stage_seconds"] for line in lines[1:] if _has(line, stage)]
        row[stage] = median(times) if times else None
    row["tokens/s"] = sum(line["update/tokens"] for line in lines[1:]) / (
        lines[-1]["time"] - lines[0]["time"]
    )
    row["age"] = sum(line["update/age_mean"] for line in lines[1:]) / (len(lines) - 1)
    row["speed-up"] = whole / seconds
    report.rows.append(row)
    return row


def fill(report: Report, part: str, found: Mapping[Arm, Lines]) -> None:
    """A row for each arm of a part, one for the limit, and the part's headline."""
    seconds = {arm.name: _seconds(lines) for arm, lines in found.items()}
    whole = seconds["synchronous"]
    for arm, lines in found.items():
        row = _row(report, arm, arm.name, lines, whole)
        if arm.name == "synchronous":
            played = row["rollout"]
    if part == "carry-over":
        report.headline["carry_over_speedup"] = whole / seconds["stream 1"]
        return
    assert isinstance(played, float)
    possible = whole / max(played, whole - played)
    report.rows.append(
        {
            "": part,
            "arm": "limit",
            "seconds of an iteration": whole / possible,
            "speed-up": possible,
        }
    )
    fastest = whole / seconds["side by side"]
    report.headline["overlap_speedup"] = fastest
    report.headline["overlap_efficiency"] = (fastest - 1) / (possible - 1)


def _has(line: Mapping[str, float], stage: str) -> bool:
    return f"{stage}/stage_seconds" in line


def _options() -> argparse.Namespace:
    made = parser(__doc__ or "")
    parts = tuple(dict.fromkeys(arm.part for arm in ARMS))
    made.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    made.add_argument("--wait", type=float, default=1.0, help="seconds before each move (overlap)")
    made.add_argument("--prompts", type=int, default=64, help="prompts of an iteration (overlap)")
    made.add_argument("--groups", type=int, default=8, help="groups of a batch (carry-over)")
    made.add_argument("--turns", type=float, default=4.0, help="median of turns (carry-over)")
    made.add_argument("--iterations", type=int, default=12, help="that are measured of each arm")
    made.add_argument("--pairs", type=int, default=3, help="pairs of runs (never-slower)")
    made.add_argument("--keep", type=Path, help="leave the runs in this directory")
    return made.parse_args()


if __name__ == "__main__":
    main()
