"""A game that any text plays: its letters are its reward."""

from __future__ import annotations

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
