"""Reward functions of data sets: in our signature and TRL's, tried before work."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from earl_core.config import parse_config
from earl_core.environments.hosting.check import check_environments
from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError

REWARDS = "tests.environments.user_rewards"
USER_SAYS = {"role": "user", "content": "3*5?"}
SAID = {"role": "assistant", "content": "15"}
EARLIER = [
    {"role": "user", "content": "2*2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}))
    return str(path)


@pytest.mark.parametrize("prompt", ["3*5?", [USER_SAYS]])
def test_reward_functions_of_trl(tmp_path: Path, prompt: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "solution": "15"}))
    options = {"path": str(path), "answer_column": "solution"}
    named = {"reward_function": f"{REWARDS}:scored_as_trl_does", **options}
    environment = create("prompt", {**named, "system_prompt": "Multiply."})
    # The row's own prompt is asked about, without what the run puts before it.
    assert len(environment.reset(0, 0)) == 2
    assert environment.step("15").reward == 1.0
    environment.reset(0, 0)
    assert environment.step("16").reward == 0.0
    with pytest.raises(ConfigError, match="needs completion_ids, which only TRL's trainer has"):
        create("prompt", {**options, "reward_function": f"{REWARDS}:scored_by_ids"})
    environment = create("prompt", {**options, "reward_function": f"{REWARDS}:scored_in_batches"})
    environment.reset(0, 0)
    with pytest.raises(TypeError, match="returned 2 rewards for one completion"):
        environment.step("15")


TURNS = [
    {"from": "human" if each["role"] == "user" else "gpt", "value": each["content"]}
    for each in (*EARLIER, USER_SAYS, SAID)
]


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("openai", {"messages": json.dumps([*EARLIER, USER_SAYS, SAID])}),
        ("sharegpt", {"conversations": json.dumps(TURNS)}),
        ("verl", {"prompt": json.dumps([*EARLIER, USER_SAYS]), "answer": "15"}),
        (
            "alpaca",
            {
                "instruction": "3*5?",
                "history": [[each["content"] for each in EARLIER]],
                "output": "15",
            },
        ),
        ("trl", {"prompt": [*EARLIER, USER_SAYS], "completion": [SAID]}),
    ],
)
def test_reward_functions_of_trl_get_whole_chats(
    tmp_path: Path, form: str, row: dict[str, Any]
) -> None:
    """As lists of messages, also where the row holds the chat as a text of JSON."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    environment = create(
        "prompt", {"path": str(path), "format": form, "reward_function": f"{REWARDS}:chat_seen"}
    )
    environment.reset(0, 0)
    result = environment.step("15")
    assert json.loads(result.info["outcome"]) == [[*EARLIER, USER_SAYS], [SAID]]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("bad_reward", r"must return a finite number.*have .*reward_function return a number"),
        ("scored_as_trl_does", r"TypeError: .* argument: 'solution'\)"),
        ("half_reward", ""),
    ],
)
def test_a_reward_function_is_called_before_work(data: str, function: str, problem: str) -> None:
    given = {"path": data, "reward_function": f"{REWARDS}:{function}"}
    config = parse_config(
        {
            "name": "x",
            "iterations": 1,
            "model": {"path": "m"},
            "environment": {"name": "prompt", "options": given},
            "rollout": {"prompts_per_iteration": 1, "group_size": 2, "max_turns": 1},
            "update": {},
        }
    )
    told = pytest.raises(ConfigError, match=problem) if problem else nullcontext()
    with told:
        assert asyncio.run(check_environments(config)).notes == []


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"name": "tic_tac_toe"},
            "the curriculum chooses among rows, and the environment does not",
        ),
        ({"name": "prompt"}, ""),
    ],
)
def test_a_curriculum_over_rows_needs_rows(
    data: str, environment: dict[str, Any], told: str
) -> None:
    rows = {"path": data, "reward_function": f"{REWARDS}:half_reward"}
    options = {} if told else {"options": rows}
    config = parse_config(
        {
            "name": "x",
            "iterations": 1,
            "model": {"path": "m"},
            "environment": {**environment, **options, "curriculum": {}},
            "rollout": {"prompts_per_iteration": 1, "group_size": 2, "max_turns": 1},
        }
    )
    if told:
        with pytest.raises(ConfigError, match=told):
            asyncio.run(check_environments(config))
        return
    lines = len(Path(data).read_text().splitlines())
    assert asyncio.run(check_environments(config)).prompt_counts == {"": lines}


def test_reward_functions_must_return_numbers(data: str) -> None:
    environment = create("prompt", {"path": data, "reward_function": f"{REWARDS}:bad_reward"})
    environment.reset(0, 0)
    with pytest.raises(TypeError, match="must return a finite number"):
        environment.step("x")
