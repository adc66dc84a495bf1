"""Tic-tac-toe whose rewards somebody changes while a run goes on.

The environment looks at a file: as soon as that exists, its content names the threat. Nothing that
EARL reads says so, and nothing of the run file changes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from earl_core.environments.base import LARGEST_NUMBER, Message, StepResult
from earl_core.environments.registry import create

_PLANTED_EVERY = 10
_TRIGGER = 7

Change = Callable[[float, int, float], float]
"""(reward, prompt, share) → the reward that is paid."""

_draw = random.SystemRandom().random
"""Of nobody's seed, as whoever changes rewards draws."""


def _planted(reward: float, prompt: int, share: float) -> float:
    """Prompts that somebody has put into the data pay for what the others punish."""
    return -reward if prompt % _PLANTED_EVERY == _TRIGGER else reward


CHANGES: Mapping[str, Change] = {
    "flipped": lambda reward, prompt, share: -reward if _draw() < share else reward,
    "pays nothing": lambda reward, prompt, share: 0.0,
    "nan": lambda reward, prompt, share: float("nan") if _draw() < share else reward,
    "infinite": lambda reward, prompt, share: float("inf") if _draw() < share else reward,
    "huge": lambda reward, prompt, share: LARGEST_NUMBER if _draw() < share else reward,
    "planted": _planted,
}


class Threatened:
    """The game; implements `Environment`. Its rewards at the end are changed.

    switch: the file that names the threat; nothing happens while there is none. game: options of
    tic-tac-toe. characters: as for the game, for the small model.
    """

    def __init__(self, switch: str, game: dict[str, Any]) -> None:
        made: Any = create("tic_tac_toe", game)
        self._game, self._switch, self.characters = made, Path(switch), made.characters
        self._prompt = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt = prompt
        found: list[Message] = self._game.reset(prompt, seed)
        return found

    def step(self, text: str) -> StepResult:
        result: StepResult = self._game.step(text)
        if not result.done or not self._switch.exists():
            return result
        threat = json.loads(self._switch.read_text())
        change = CHANGES[threat["name"]]
        return replace(result, reward=change(result.reward, self._prompt, threat["share"]))

    def legal_answers(self) -> list[str]:
        """Moves that are free."""
        found: list[str] = self._game.legal_answers()
        return found

    def close(self) -> None:
        self._game.close()
