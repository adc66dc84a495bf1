"""An agent that asks a shop for prices. It knows OpenAI's API, and nothing of EARL."""

import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from shop import GOODS, PRICES, price

API = AsyncOpenAI(base_url="http://unused", api_key="unused")
"""One for the process: making a client takes 50 ms."""

RULES = "Call the tool for every price, then say its result."
TURNS = 3
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Says what an item of the shop costs.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string", "description": "Its name, one word."}},
                "required": ["item"],
            },
        },
    }
]

Call = Callable[[str, dict[str, Any]], Awaitable[str]]
"""Runs a tool: its name and arguments to its result. Raises what goes wrong."""


async def run(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """One episode, for EARL: a task, the policy's address, and the reward."""

    async def call(name: str, arguments: dict[str, Any]) -> str:
        if name != "price":
            raise ValueError(f"there is no tool {name!r}")
        return price(**arguments)

    policy = API.with_options(base_url=base_url, api_key=api_key)
    return await solve(policy, task["index"], TOOLS, call)


async def solve(
    policy: AsyncOpenAI, number: int, tools: Sequence[Any], call: Call
) -> dict[str, Any]:
    """Ask for one price; 1 for the right one, 0.1 for a call that the tool answered.

    number: of the task, which fixes the item and how many examples of calls the prompt shows.
    """
    source = random.Random(f"shop/{number}")
    shown = 1 + number % 4
    item, *examples = source.sample(GOODS, 1 + shown)
    messages: list[Any] = [{"role": "system", "content": RULES}]
    for example in examples:
        messages += _example(example)
    messages.append(_asked(item))
    answer, called = "", False
    try:
        for _ in range(TURNS):
            reply = await policy.chat.completions.create(
                model="policy", messages=messages, tools=tools
            )
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            answer = said.content or ""
            if not said.tool_calls:
                break
            for each in said.tool_calls:
                result, worked = await _result(call, each.function)
                called = called or worked
                messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    except BadRequestError:
        answer = ""  # the episode's turns or tokens are spent
    right = re.findall(r"\d+", answer)[-1:] == [str(PRICES[item])]
    return {
        "reward": 1.0 if right else 0.1 * called,
        "outcome": "right" if right else "called" if called else "no call",
        "outcomes": ["right", "called", "no call"],
        "metrics": {f"called_after_{shown}_examples": float(called)},
    }


async def _result(call: Call, function: Any) -> tuple[str, bool]:
    """What the model is told of a call, and whether the tool did what it was asked."""
    try:
        return await call(function.name, json.loads(function.arguments)), True
    except Exception as error:
        return f"Error: {error}", False


def _asked(item: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What does the {item} cost?"}


def _example(item: str) -> list[dict[str, Any]]:
    function = {"name": "price", "arguments": json.dumps({"item": item})}
    call = {"id": item, "type": "function", "function": function}
    result = str(PRICES[item])
    return [
        _asked(item),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": item, "content": result},
        {"role": "assistant", "content": result},
    ]
