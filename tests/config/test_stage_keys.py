"""Keys of sealed stages: a run that was begun with an older EARL goes on only if they are equal."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from earl_core.config import load_config, parse_config
from earl_core.config.run import STAGE_SETTINGS, RunConfig, stage_key
from flows import iteration as flow

KNOWN = Path(__file__).with_name("stage_keys.json")
KNOWN_READS = Path(__file__).with_name("stage_reads.json")
RECIPES = (
    "demo",
    "tictactoe_tiny",
    "tictactoe_stages",
    "tictactoe_selector",
    "connect_four_smollm2",
)
BASE: dict[str, Any] = {
    "name": "golden",
    "seed": 7,
    "iterations": 5,
    "runs_directory": "/nowhere/runs",
    "model": {"path": "/nowhere/model"},
    "environment": {"name": "tic_tac_toe"},
    "rollout": {"prompts_per_iteration": 8, "group_size": 4, "max_turns": 5},
}
RUNS: dict[str, dict[str, Any]] = {
    "smallest": {},
    "reference": {
        "algorithm": {"kl": {"placement": "loss", "coefficient": 0.02}},
        "update": {"precision": "bf16", "epochs": 2, "minibatches": 2},
    },
    "turns": {
        "algorithm": {
            "advantage": {"name": "gigpo"},
            "kl": {"placement": "reward", "coefficient": 0.01},
        }
    },
    "mixture": {
        "environment": None,
        "environments": [
            {"name": "tic_tac_toe", "weight": 2.0},
            {"name": "connect_four", "label": "four", "weight": 1.0},
        ],
        "curriculum": {},
    },
    "suites": {
        "evaluation": {
            "every": 2,
            "episodes": 16,
            "suites": [
                {"label": "boards", "name": "tic_tac_toe", "prompts": 4},
            ],
        }
    },
    "layouts": {
        "stages": {
            "placement": "separate",
            "rollout": {"replicas": 2},
            "update": {"shard": 2},
            "changes": [{"iteration": 2, "rollout": {"replicas": 4}}],
        },
        "rollout": {**BASE["rollout"], "engine": "vllm", "dtype": "bfloat16"},
    },
}


def configs() -> dict[str, RunConfig]:
    found = {
        name: load_config(name, ["runs_directory=/nowhere/runs", "model.path=/nowhere/model"])
        for name in RECIPES
    }
    return found | {name: parse_config(BASE | changes) for name, changes in RUNS.items()}


def keys() -> dict[str, dict[str, str]]:
    inputs = ["0" * 32, "f" * 32]
    return {
        name: {stage: stage_key(config, "uid", 3, stage, inputs) for stage in STAGE_SETTINGS}
        for name, config in configs().items()
    }


def reads() -> dict[str, dict[str, list[str]]]:
    """Whose data digests each stage's key covers, in order; the rounds are those of the list."""

    def of(config: RunConfig) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}

        class Recording(dict[str, str]):
            def __missing__(self, name: str) -> str:
                return name

        class Stages:
            controller = SimpleNamespace(
                config=config, episodes=SimpleNamespace(begin=lambda *manifests: None)
            )
            iteration = 3
            manifests = Recording()

            async def input_weights(self, plan: object) -> str:
                return "weights"

            async def submit(self, task: Any, inputs: list[str], *futures: object) -> str:
                found[task.name] = list(inputs)
                return str(task.name)

        async def pages(*given: object) -> None:
            pass

        kept = flow.publish_artifacts
        flow.publish_artifacts = pages  # type: ignore[assignment]
        try:
            asyncio.run(flow._after_select(Stages(), "plan"))  # type: ignore[arg-type]
        finally:
            flow.publish_artifacts = kept
        return found

    return {name: of(config) for name, config in configs().items()}


def test_a_stage_reads_what_it_read_before() -> None:
    assert reads() == json.loads(KNOWN_READS.read_text())


def test_a_run_that_was_begun_before_does_not_repeat_its_stages() -> None:
    """A change of a key is a line for the changelog's "breaking" part, and then for `KNOWN`, which
    `python -m tests.config.test_stage_keys` prints with what stages read."""
    assert keys() == json.loads(KNOWN.read_text())


if __name__ == "__main__":
    json.dump({"keys": keys(), "reads": reads()}, sys.stdout, indent=1)
