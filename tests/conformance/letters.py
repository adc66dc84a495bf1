"""A game that any text plays: its letters are its reward."""

from __future__ import annotations

from dataclasses import replace

from earl_core.environments.base import Message, StepResult

TURNS = 3


class Letters:
    """Three turns, each rewarded with 0 to 1 by the sum of what was said."""

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._turn = 0
        return [{"role": "user", "content": f"say {prompt}"}]

    def step(self, text: str) -> StepResult:
        self._turn += 1
        total = sum(map(ord, text)) % 5
        said: list[Message] = [{"role": "user", "content": f"on {total % 2}"}]
        return StepResult(said, total / 4, self._turn == TURNS)

    def close(self) -> None:
        pass


class SomeLetters(Letters):
    """Letters that pay nothing, but for the prompts whose number modulo `of` is in `paying`."""

    def __init__(self, paying: list[int], of: int) -> None:
        self._paying, self._of = paying, of

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._pays = prompt % self._of in self._paying
        return super().reset(prompt, seed)

    def step(self, text: str) -> StepResult:
        result = super().step(text)
        return result if self._pays else replace(result, reward=0.0)
