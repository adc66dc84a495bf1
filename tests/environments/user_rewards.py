"""Reward functions of data sets, as users write them."""

from __future__ import annotations

import json
from typing import Any


def half_reward(completion: str, row: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """0.5, with a metric and an outcome."""
    return 0.5, {"length": len(completion), "outcome": "half", "note": "text"}


def bad_reward(completion: str, row: dict[str, Any]) -> Any:
    return "much"


def scored_strictly(completion: str, row: dict[str, Any], *, strict: bool = True) -> float:
    """Takes no messages."""
    return 0.5 if strict else 0.0


def scored_as_trl_does(
    completions: list[Any], solution: list[str], prompts: Any = None, **columns: list[Any]
) -> list[float]:
    """1 for the solution; asserts what TRL would give."""
    assert set(columns) <= {"answer"}
    (prompt,), (completion,) = prompts, completions
    if not isinstance(prompt, str):
        assert prompt == [{"role": "user", "content": "3*5?"}]
        assert completion[-1]["role"] == "assistant"
        completion = completion[-1]["content"]
    return [float(completion == each) for each in solution]


def chat_seen(prompts: list[Any], completions: list[Any]) -> list[Any]:
    """What was given, as the outcome."""
    return [(1.0, {"outcome": json.dumps([prompts[0], completions[0]])})]


def scored_by_ids(completions: list[str], completion_ids: list[Any]) -> list[float]:
    """Not without a trainer."""
    return []


def scored_in_batches(completions: list[str]) -> list[float]:
    """Two rewards for one completion."""
    return [0.0, 1.0]


async def scored_later(completion: str, row: dict[str, Any]) -> float:
    """Not for prompts."""
    return 1.0


def scored_as_verl_does(data_source: str, solution_str: str, ground_truth: str = "") -> float:
    return float(solution_str == ground_truth)
