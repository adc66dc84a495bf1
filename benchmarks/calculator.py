"""Does SmolLM2-135M learn to call a calculator? Its template knows no tools: words tell of them.

Products of two numbers, one to four examples of calls in front: with three or fewer it never calls
at first, with four it mostly does, so that there is something to learn from. Reward: 1 for the
right product, 0.1 for a call that was read and a wrong answer after it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from earl_core.environments.base import Message, StepResult
from earl_core.environments.rewards import number_by_tools
from tools.harness import REPOSITORY, Report, parser, publish

EXAMPLES = ((23, 47), (58, 31), (76, 92), (19, 64))
RULES = "Call the calculator for every product, then say its result."
CONFIG = {
    "model": {"path": "model", "builder": "earl_core.models.smollm2:build"},
    "environment": {
        "name": "benchmarks.calculator:Multiplication",
        "tools": ["calculator"],
    },
    "rollout": {
        "engine": "vllm",
        "prompts_per_iteration": 8,
        "group_size": 8,
        "max_turns": 3,
        "max_tokens_per_turn": 48,
        "max_tokens_per_episode": 80,
        "max_model_len": 1024,
        "max_running_requests": 64,
        "dtype": "float32",
        "vllm": {"kv_cache_gib": 1, "block_size": 32},
    },
    "algorithm": {
        "advantage": "grpo",
        "policy_loss": "ppo_clip",
        "aggregation": "token_mean",
    },
    "update": {"precision": "fp32", "learning_rate": 5e-5, "max_tokens_per_microbatch": 4096},
    "tracking": {"enabled": False},
    "evaluation": {"every": 0},
}


class Multiplication:
    """The prompt is the pair of factors; an answer without a call of a tool ends the episode."""

    def __init__(self) -> None:
        self._used: list[Message] = []
        self._product = self._examples = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        source = random.Random(f"multiplication/{prompt}")
        one, other = source.randint(11, 99), source.randint(11, 99)
        self._used, self._product = [], one * other
        self._examples = 1 + prompt % len(EXAMPLES)
        examples = [m for pair in EXAMPLES[: self._examples] for m in _example(*pair)]
        return [{"role": "system", "content": RULES}, *examples, _asked(one, other)]

    def tools_used(self, messages: Sequence[Message]) -> None:
        self._used += messages

    def step(self, text: str) -> StepResult:
        reward, told = number_by_tools(text, {"answer": str(self._product)}, self._used)
        told |= {f"called after {self._examples}": told["called"]}
        told |= {f"right after {self._examples}": told["correct"]}
        outcome = "right" if told["correct"] else "called" if told["called"] else "no call"
        return StepResult([], reward, True, {"outcome": outcome, "metrics": told})

    def close(self) -> None: ...


def _asked(one: int, other: int) -> Message:
    return {"role": "user", "content": f"What is {one} * {other}?"}


def _example(one: int, other: int) -> list[Message]:
    function = {"name": "calculator", "arguments": {"expression": f"{one} * {other}"}}
    result = str(one * other)
    return [
        _asked(one, other),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],  # type: ignore[list-item]
        },
        {"role": "tool", "content": result, "tool_call_id": "1", "name": "calculator"},
        {"role": "assistant", "content": result},
    ]


def main() -> None:
    made = parser("SmolLM2-135M learns to call a calculator.")
    made.add_argument("--iterations", type=int, default=6)
    made.add_argument("--directory", type=Path, help="kept, and gone on with")
    made.add_argument("--png", type=Path, help="the curve as a picture")
    options = made.parse_args()
    if options.quick:
        options.iterations = 1
    directory = options.directory or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "calculator.yaml"
    file.write_text(yaml.safe_dump({"name": "run", "iterations": options.iterations, **CONFIG}))
    command = [sys.executable, "-m", "flows.cli", "train", str(file), "--plain"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, cwd=directory, env=environment, check=True)
    report = Report("calculator", "SmolLM2-135M learns to call a calculator")
    lines = (directory / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    minutes = 0.0
    for row in map(json.loads, lines):
        minutes += sum(v for name, v in row.items() if name.endswith("/stage_seconds")) / 60
        report.rows.append(
            {
                "iteration": row["iteration"],
                "minutes": round(minutes, 1),
                **{
                    f"{name} after {count}, %": round(
                        100 * row[f"rollout/environment/{name} after {count}"], 1
                    )
                    for count in (1, 2, 4)
                    for name in ("called", "right")
                },
                "reward": round(row["reward/mean"], 3),
                "tokens/s": round(row["rollout/tokens_per_second"], 1),
            }
        )
    report.headline["reward"] = report.rows[-1]["reward"]
    report.notes.append(
        "64 episodes an iteration, 16 after each number of examples; minutes are those of the "
        "stages so far."
    )
    if options.png:
        draw(report.rows, options.png)
    publish(report, options)


def draw(rows: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Well-formed calls, right answers and the reward over the minutes of the run's stages."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (calls, reward) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    minutes = [row["minutes"] for row in rows]
    for count in (1, 2, 4):
        shown = "1 example" if count == 1 else f"{count} examples"
        calls.plot(minutes, [row[f"called after {count}, %"] for row in rows], "o-", label=shown)
    calls.set(title="Answers with a well-formed call", ylabel="% of episodes", ylim=(-4, 104))
    calls.legend(title="prompt with", frameon=False)
    reward.plot(minutes, [row["reward"] for row in rows], "o-", color="black")
    reward.set(title="Mean reward", ylabel="reward", ylim=(-0.04, 1.04))
    for axes in (calls, reward):
        axes.set(xlabel="minutes of stages, from the start of the run", xlim=(0, None))
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main()
