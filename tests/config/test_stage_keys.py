"""Keys of sealed stages: a run that was begun with an older EARL goes on only if they are equal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from earl_core.config import load_config, parse_config
from earl_core.config.run import RunConfig
from earl_core.config.stage_keys import stage_key
from earl_core.deployment.stages import STAGE_SETTINGS, rounds, taking_part

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
    "critic": {"algorithm": {"advantage": "gae"}, "critic": {"warmup_iterations": 2}},
    "imitation": {"imitation": {"data": "chats.jsonl", "iterations": 4}},
    "layouts": {
        "stages": {
            "placement": "separate",
            "rollout": {"replicas": 2},
            "update": {"shard": 2},
            "changes": [{"iteration": 2, "rollout": {"replicas": 4}}],
        },
        "rollout": {**BASE["rollout"], "engine": "vllm", "dtype": "bfloat16"},
    },
    "stream": {
        "schedule": {"staleness": 2, "mode": "stream"},
        "algorithm": {"importance_correction": {}},
        "rollout": {**BASE["rollout"], "engine": "torch"},
    },
}


def configs() -> dict[str, RunConfig]:
    found = {
        name: load_config(name, ["runs_directory=/nowhere/runs", "model.path=/nowhere/model"])
        for name in RECIPES
    }
    found |= {name: parse_config(BASE | changes) for name, changes in RUNS.items()}
    return {name: _as_begun(config) for name, config in found.items()}


def _as_begun(config: RunConfig) -> RunConfig:
    """What `auto` was before there was such a thing."""
    if config.selector.policy != "auto":
        return config
    fixed = config.selector.model_copy(update={"policy": "fixed"})
    return config.model_copy(update={"selector": fixed})


def keys() -> dict[str, dict[str, str]]:
    inputs = ["0" * 32, "f" * 32]
    return {
        name: {
            stage: stage_key(config, "uid", 3, stage, inputs)
            for stage in STAGE_SETTINGS
            if stage != "demonstrate" or config.imitation
            if stage != "collect" or config.schedule.streams
            if stage not in ("value", "critic") or config.critic
        }
        for name, config in configs().items()
    }


def reads() -> dict[str, dict[str, list[str]]]:
    """Whose data digests each stage's key covers, in order."""

    return {
        name: {
            stage.name: list(stage.sources(config, imitates))
            for stages in rounds(taking_part(config, imitates))
            for stage in stages
        }
        for name, config in configs().items()
        for imitates in [config.imitates(3)]
    }


def test_a_stage_reads_what_it_read_before() -> None:
    assert reads() == json.loads(KNOWN_READS.read_text())


def test_a_run_that_was_begun_before_does_not_repeat_its_stages() -> None:
    """A change of a key is a line for the changelog's "breaking" part, and then for `KNOWN`, which
    `python -m tests.config.test_stage_keys` prints with what stages read."""
    assert keys() == json.loads(KNOWN.read_text())


if __name__ == "__main__":
    json.dump({"keys": keys(), "reads": reads()}, sys.stdout, indent=1)


def test_how_long_scores_are_waited_for_is_in_no_key() -> None:
    """So a run whose scores came too late goes on with another deadline, and repeats nothing."""

    def keys(*functions: dict[str, Any]) -> dict[str, str]:
        config = parse_config(BASE | {"reward": {"functions": list(functions)}})
        names = ("reward", "evaluation", "reward_wave2")
        return {name: stage_key(config, "uid", 0, name, []) for name in names}

    length = {"function": "builtins:len", "label": "length"}
    later = {"function": "later", "label": "people", "options": {"directory": "a"}}
    wait = {"deadline_seconds": 900, "poll_seconds": 1, "timeout_seconds": 5}
    longer = {**later, "options": {"directory": "a", **wait}}
    elsewhere = {**later, "options": {"directory": "b"}}
    assert keys(length, later) == keys(length, longer)
    # Who gives the scores is in the key of rewards; evaluations ask others alone.
    for other in (keys(length, elsewhere), keys(length, {**later, "weight": 2.0}), keys(length)):
        assert other["evaluation"] == keys(length, later)["evaluation"]
        assert other["reward"] != keys(length, later)["reward"]
    assert keys(later)["evaluation"] != keys(length)["evaluation"]
    # Another function's options of these names may decide its scores.
    mine = {**length, "options": {"timeout_seconds": 1}}
    assert keys(mine)["reward"] != keys(length)["reward"]


def test_who_only_looks_is_in_no_key() -> None:
    def keys(**given: str) -> dict[str, str]:
        config = parse_config(BASE | given)
        return {stage: stage_key(config, "uid", 0, stage, []) for stage in STAGE_SETTINGS}

    assert keys(guard="off") == keys(guard="warn") == keys()
    acts = keys(guard="act")
    assert [name for name in acts if acts[name] != keys()[name]] == ["advantage"]


def test_an_adapter_is_part_of_what_is_played_and_trained(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    (start / "adapter_model.safetensors").write_bytes(b"one")

    def keys(adapter: dict[str, Any] | None) -> dict[str, str]:
        config = parse_config(BASE | {"model": {"path": "/nowhere/model", "adapter": adapter}})
        names = ("rollout", "evaluation", "update", "reference", "reward")
        return {name: stage_key(config, "uid", 0, name, []) for name in names}

    assert keys(None) == {
        name: stage_key(parse_config(BASE), "uid", 0, name, []) for name in keys(None)
    }
    found = [
        keys(adapter) for adapter in (None, {}, {"rank": 8}, {"alpha": 8}, {"targets": ["q_proj"]})
    ]
    found.append(keys({"from": str(start)}))
    (start / "adapter_model.safetensors").write_bytes(b"other")
    found.append(keys({"from": str(start)}))
    for stage in ("rollout", "evaluation", "update"):
        assert len({each[stage] for each in found}) == len(found)
    # The base is the same, and what is scored is among the inputs.
    for stage in ("reference", "reward"):
        assert len({each[stage] for each in found}) == 1
