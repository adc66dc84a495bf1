"""Tic-tac-toe in which most prompts are hopeless: they pay the same whatever is played."""

from __future__ import annotations

from dataclasses import replace

from earl_core.environments.base import Message, StepResult
from earl_core.environments.registry import create


class MostlyHopeless:
    """Of every `of` prompts one is a game; in the others each episode ends with `lost`.

    characters, legal_answers: as for the game, for the small model.
    """

    def __init__(self, of: int = 5, lost: float = -1.0) -> None:
        self._game = create("tic_tac_toe", {"style": "compact"})
        self._of, self._lost, self._hopeless = of, lost, False
        self.characters = self._game.characters

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._hopeless = prompt % self._of != 0
        return self._game.reset(prompt, seed)

    def step(self, text: str) -> StepResult:
        result = self._game.step(text)
        if not self._hopeless:
            return result
        return replace(result, reward=self._lost if result.done else 0.0)

    def legal_answers(self) -> list[str]:
        """Moves that are free."""
        found: list[str] = self._game.legal_answers()
        return found

    def close(self) -> None:
        self._game.close()
