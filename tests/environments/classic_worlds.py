"""Environments of verifiers' classic interface, as published ones are written."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [
    {"question": "Say 3", "answer": "3"},
    {"question": "Say 4", "answer": "4"},
]


def right(completion: Any, answer: str) -> float:
    """Whether the last answer is the row's."""
    return float(completion[-1].content == answer)


def length(completion: Any) -> float:
    """A metric."""
    return float(len(completion[-1].content))


async def judged(completion: Any) -> float:
    """A judge that does not answer always."""
    if completion[-1].content == "3":
        raise ConnectionError("the judge is down")
    return 1.0


def forgetful(completion: Any) -> float | None:
    """Returns nothing for what it does not know."""
    return 0.5 if completion[-1].content in ("", "4") else None


class Higher(vf.MultiTurnEnv):
    """Says what is next until the answer is right."""

    @vf.stop
    async def guessed(self, state: Any) -> bool:
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1].content == state["answer"]

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": "Another."}]


def look_up(city: str) -> str:
    """Look a city up.

    Args:
        city: Its name.
    """
    return f"{city} is found"


def remember(number: int, seen: list[int]) -> str:
    """Remember a number.

    Args:
        number: The number.
        seen: Those of before.
    """
    seen.append(number)
    return str(seen)


class Remembering(vf.StatefulToolEnv):
    """Keeps the numbers of an episode, which the model is not told of."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_tool(remember, args_to_skip=["seen"])

    async def setup_state(self, state: Any) -> None:
        state["seen"] = []

    def update_tool_args(
        self, tool_name: str, tool_args: dict, messages: Any, state: Any, **_: Any
    ) -> dict:
        return {**tool_args, "seen": state["seen"]}


def group(completions: list[Any]) -> list[float]:
    """Scores all episodes of a prompt together."""
    return [0.0 for _ in completions]


def load_environment(kind: str) -> Any:
    """What verifiers calls."""
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    if kind in ("mixed", "group"):
        score = group if kind == "group" else judged
        scores = vf.RubricGroup([vf.Rubric(funcs=[length]), vf.Rubric(funcs=[score, forgetful])])
        rows = Dataset.from_list(ROWS)
        higher = Higher(max_turns=4, dataset=rows, eval_dataset=rows, rubric=rubric)
        judge = vf.SingleTurnEnv(dataset=Dataset.from_list(2 * ROWS), rubric=scores)
        return vf.EnvGroup([higher, judge], env_names=["higher", "judge"])
    given: dict[str, Any] = {
        "dataset": Dataset.from_list(ROWS),
        "eval_dataset": Dataset.from_list(ROWS[1:]),
        "system_prompt": "Be brief.",
        "rubric": rubric,
    }
    if kind == "multi":
        return Higher(max_turns=4, **given)
    if kind == "tool":
        return vf.ToolEnv(tools=[look_up], **given)
    if kind == "stateful":
        return Remembering(**given)
    return vf.SingleTurnEnv(**given)
