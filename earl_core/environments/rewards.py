"""Reward functions for the prompt environment.

A reward function is called as `function(completion, row)` and returns a float, or a float and a
dict: its numbers become metrics, its `outcome` (str) is counted. `row` is the data set's row as a
dict; `row["answer"]` is the value of the configured answer column. With a third argument,
`messages`, it gets the answers with calls of tools and the tools' results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from earl_core.environments.base import Message

_NUMBER = re.compile(r"-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")


def exact_match(completion: str, row: dict[str, Any]) -> float:
    """1 when the completion equals the answer, apart from case and surrounding space, else 0."""
    return float(completion.strip().casefold() == str(_answer(row)).strip().casefold())


def contained_number(completion: str, row: dict[str, Any]) -> float:
    """1 when the last number in the completion equals the last number in the answer, else 0.

    Understands signs, decimals and thousands separators ("-1,234.50").
    """
    given, wanted = _last_number(completion), _last_number(str(_answer(row)))
    return float(given is not None and given == wanted)


def number_by_tools(
    completion: str, row: dict[str, Any], messages: Sequence[Message]
) -> tuple[float, dict[str, Any]]:
    """As `contained_number`, but 0.1 for a wrong number after a call that a tool has answered."""
    right = contained_number(completion, row)
    results = [message["content"] for message in messages if message["role"] == "tool"]
    called = any(not result.startswith("Error: ") for result in results)
    return right or 0.1 * called, {"correct": right, "called": float(called)}


def nothing(completion: str, row: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """0, for prompts without an answer: the functions of the section `reward` score them."""
    return 0.0, {"outcome": "answered"}


def _answer(row: dict[str, Any]) -> Any:
    if "answer" not in row:
        raise KeyError("the row has no answer: set the environment's answer_column")
    return row["answer"]


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
