"""Environments of a user, by import path: some of their episodes go wrong."""

from __future__ import annotations

import time

from earl_core.environments.base import Message, StepResult


class Unreliable:
    """Two turns; prompts in `raising` raise and those in `hanging` never return."""

    def __init__(self, raising: list[int], hanging: list[int]) -> None:
        self._raising = raising
        self._hanging = hanging
        self._prompt = 0
        self._turn = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt = prompt
        self._turn = 0
        return [{"role": "user", "content": f"prompt {prompt}"}]

    def step(self, text: str) -> StepResult:
        if self._prompt in self._raising:
            raise ValueError("this prompt has no answer")
        if self._prompt in self._hanging:
            time.sleep(3600)
        self._turn += 1
        done = self._turn == 2
        return StepResult([{"role": "user", "content": "go on"}], 1.0, done, {"outcome": "win"})

    def close(self) -> None:
        pass
