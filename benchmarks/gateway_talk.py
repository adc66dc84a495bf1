"""The same conversation as an environment and as an agent, for `benchmarks.gateway`."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from earl_core.environments.base import Message, StepResult

API = AsyncOpenAI(base_url="http://unused", api_key="unused")


def _said(index: int, turn: int) -> Message:
    return {"role": "user", "content": f"Story {index}, part {turn}: go on telling it at length."}


class Talk:
    """Asks for the parts of a story."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._index = self._turn = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._index, self._turn = prompt, 0
        return [_said(prompt, 0)]

    def step(self, text: str) -> StepResult:
        self._turn += 1
        over = self._turn == self._turns
        return StepResult([_said(self._index, self._turn)], float(len(text)), over)

    def close(self) -> None:
        pass


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """`Talk`, through the API."""
    policy = API.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [_said(task["index"], 0)]
    length = 0
    for turn in range(task["turns"]):
        reply = await policy.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        length += len(text)
        messages += [{"role": "assistant", "content": text}, _said(task["index"], turn + 1)]
    return float(length)
