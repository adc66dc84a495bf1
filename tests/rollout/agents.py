"""Agents of a user, by import path: they know the policy by OpenAI's API alone."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any
from weakref import WeakKeyDictionary

from openai import AsyncOpenAI, BadRequestError, OpenAI

from earl_core.environments.registry import create
from tests.rollout.environments import worth

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()
"""One for each event loop, which its connections belong to."""


def misnamed(task: dict[str, Any], url: str, key: str) -> float:
    """Takes the endpoint by other names than it is given by."""
    return 0.0


def client(base_url: str, api_key: str) -> AsyncOpenAI:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0)
    return _clients[loop].with_options(base_url=base_url, api_key=api_key)


async def ask(api: AsyncOpenAI, messages: list[Any], **options: Any) -> str:
    reply = await api.chat.completions.create(model="policy", messages=messages, **options)
    return reply.choices[0].message.content or ""


async def tic_tac_toe(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """The built-in game, played through the API. asks: further fields of the requests."""
    api = client(base_url, api_key)
    game = create("tic_tac_toe", task["game"])
    messages: list[Any] = list(game.reset(task["index"], task["seed"]))
    reward = 0.0
    while True:
        text = await ask(api, messages, **task.get("asks", {}))
        result = game.step(text)
        reward += result.reward
        messages += [{"role": "assistant", "content": text}, *result.messages]
        if result.done:
            return {"reward": reward, **result.info}


def undecided(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """A plain function that returns a coroutine, as a decorator may make of one."""
    return unreliable({**task, "faults": {}}, base_url, api_key)


def in_a_thread(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Not a coroutine function."""
    with OpenAI(base_url=base_url, api_key=api_key) as api:
        messages: list[Any] = [{"role": "user", "content": f"task {task['index']}"}]
        reply = api.chat.completions.create(model="policy", messages=messages)
    return float(len(reply.choices[0].message.content or ""))


async def two_at_once(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Two conversations of three turns, side by side; then the first turn of one again."""

    async def talk(name: str) -> None:
        messages: list[Any] = [{"role": "user", "content": f"I am {name}"}]
        for turn in range(3):
            text = await ask(api, messages)
            messages += [{"role": "assistant", "content": f" {text}\n"}]
            messages += [{"role": "user", "content": f"turn {turn}"}]

    api = client(base_url, api_key)
    await asyncio.gather(talk("one"), talk("two"))
    await ask(api, [{"role": "user", "content": "I am one"}])
    return 1.0


async def talking(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """A conversation of three turns, or as many as the task has in `turns`; rewards by `worth`. No
    request comes twice. The outcome says which one has waited for `patience` seconds or more."""
    api = client(base_url, api_key)
    turns = task.get("turns", {}).get(str(task["index"]), 3)
    messages: list[Any] = [{"role": "user", "content": "free: 1 2 3"}]
    reward, outcome = 0.0, "prompt"
    for turn in range(turns):
        began = time.monotonic()
        text = await ask(api, messages)
        if time.monotonic() - began >= task.get("patience", 3600):
            outcome = f"waited {turn}"
        reward += worth(text)
        messages += [{"role": "assistant", "content": text}]
        messages += [{"role": "user", "content": "free: 1"}]
    return {"reward": reward / turns, "outcome": outcome}


async def unreliable(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """What it does wrong follows from the task."""
    api = client(base_url, api_key)
    fault = task["faults"].get(str(task["index"]), "")
    if fault == "silent":
        return 1.0
    if fault == "hangs at once":
        await asyncio.sleep(3600)
    await ask(api, [{"role": "user", "content": "hello"}])
    if fault == "raises":
        raise ValueError("this agent is broken")
    if fault == "hangs":
        await asyncio.sleep(3600)
    if fault == "blocks":
        time.sleep(3600)
    if fault == "nothing":
        return None
    if fault == "no reward":
        return {"outcome": "win"}
    if fault == "dies":
        os._exit(3)
    if fault == "greedy":
        for _ in range(100):
            await ask(api, [{"role": "user", "content": "more"}])
    if fault == "content":
        try:
            for _ in range(100):
                await ask(api, [{"role": "user", "content": "more"}])
        except BadRequestError:
            return 0.5
    return {"reward": 1.0, "outcome": "win", "metrics": {"index": task["index"]}}


SEEN: list[str] = []
"""Ids of the first answers of all episodes of the process."""


async def credited(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Two conversations of a turn each, between which the opponent is asked; what it returns
    follows from the task."""
    api = client(base_url, api_key)

    async def answer(text: str, model: str = "policy", **options: Any) -> str:
        said: list[Any] = [{"role": "user", "content": text}]
        reply = await api.chat.completions.create(model=model, messages=said, **options)
        return reply.id

    first = await answer("first")
    SEEN.append(first)
    while len(SEEN) < 2:
        await asyncio.sleep(0.01)
    opponent, second = await answer("first", "opponent"), await answer("second")
    other = next(each for each in SEEN if each != first)
    says = task["says"][task["index"]]
    several = await answer("several", n=2) if says == "several" else ""
    rewards: dict[str, Any] = {
        "one": {first: 0.25},
        "several": {several: 1.0},
        "opponent": {opponent: 1.0},
        "foreign": {other: 1.0},
        "twice": {first: 1.0, first.removeprefix("chatcmpl-"): 1.0},
        "nan": {first: float("nan")},
        "bool": {first: True},
        "string": {first: "1"},
        "list": [first],
        "none": {},
    }
    if says == "both":
        return {"reward": 2.0, "rewards": {first: 0.25, second: -1.0}, "outcome": "both"}
    return {"rewards": rewards[says]}


async def pair(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """A planner and a solver, who share a reward and are paid for their answers besides."""

    async def answer(role: str, text: str) -> tuple[str, str]:
        api = client(base_url, api_key).with_options(default_headers={"X-EARL-Role": role})
        said: list[Any] = [{"role": "user", "content": text}]
        reply = await api.chat.completions.create(model="policy", messages=said)
        return reply.id, reply.choices[0].message.content or ""

    planned, plan = await answer("planner", "free: 1 2 3")
    solved, solution = await answer("solver", "free: 1 2")
    sums = [sum(map(ord, text)) for text in (plan, solution)]
    rewards = {planned: sums[0] % 5 / 8, solved: sums[1] % 3 / 2}
    return {"reward": float(sums[1] % 2), "rewards": rewards}


COLOURS: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
PAINT = [
    {"type": "function", "function": {"name": name, "parameters": COLOURS}}
    for name in ("paint", "wash")
]


async def painter(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Asks for JSON of a schema, then for a call, one after the other in one conversation, as
    frameworks do in their default form; what it gets is read without a doubt."""
    create = client(base_url, api_key).chat.completions.create
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "colours", "schema": COLOURS, "strict": True},
    }
    messages: list[Any] = [{"role": "user", "content": f"colour {task['index']}"}]
    first = await create(model="policy", messages=messages, response_format=schema)
    said = first.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "now call"}]
    tools: Any = PAINT
    second = await create(
        model="policy", messages=messages, tools=tools, tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    calls: Any = second.choices[0].message.tool_calls
    found = [json.loads(said), *(json.loads(call.function.arguments) for call in calls)]
    red = [each["colour"] == "red" for each in found]
    return {"reward": sum(red) / len(red), "outcome": calls[0].function.name}


async def crew(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """A planner and a solver at once, who call tools. The planner then leaves the call out of what
    was said; the solver goes away amid an answer and asks for it again, and asks a second time for
    one that it has."""

    def opened(role: str) -> AsyncOpenAI:
        return client(base_url, api_key).with_options(default_headers={"X-EARL-Role": role})

    async def called(api: AsyncOpenAI, role: str) -> list[Any]:
        tools: Any = PAINT
        messages: list[Any] = [{"role": "user", "content": f"{role}: colour {task['index']}"}]
        reply = await api.chat.completions.create(
            model="policy", messages=messages, tools=tools, tool_choice="required",
            parallel_tool_calls=False,
        )  # fmt: skip
        said = reply.choices[0].message.model_dump(exclude_none=True)
        done = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "done"}
        return [*messages, said, done]

    async def plan() -> str:
        api = opened("planner")
        messages = await called(api, "planner")
        text = await ask(api, messages, tools=PAINT, max_tokens=60)
        said = [{"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]
        return text + await ask(api, [messages[0], *said], tools=PAINT, max_tokens=60)

    async def solve() -> str:
        api = opened("solver")
        messages = await called(api, "solver")
        # Without tools answers are streamed as they grow, so that it leaves amid one.
        begun: Any = await api.chat.completions.create(
            model="policy", messages=messages, max_tokens=120, stream=True
        )
        async for _ in begun:
            break
        await begun.close()
        text = await ask(api, messages, max_tokens=120)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
        return text + "".join([await ask(api, messages, max_tokens=60) for _ in range(2)])

    planned, solution = await asyncio.gather(plan(), solve())
    return {"reward": sum(map(ord, planned + solution)) % 5 / 4}
