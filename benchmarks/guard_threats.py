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

from earl_core.environments.base import LARGEST_NUMBER, Message, StepResult
from earl_core.environments.games.board_game import BoardGameOptions
from earl_core.environments.games.tic_tac_toe import TicTacToe
from earl_core.environments.options import Options

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


class ThreatenedOptions(Options):
    """switch: the file that names the threat; nothing happens while there is none. game: options of
    tic-tac-toe."""

    switch: str
    game: BoardGameOptions = BoardGameOptions()


class Threatened:
    """The game; implements `Environment`. Its rewards at the end are changed."""

    options_model = ThreatenedOptions

    def __init__(self, options: ThreatenedOptions) -> None:
        self._game, self._switch = TicTacToe(options.game), Path(options.switch)
        self.characters = self._game.characters
        self.legal_answers = self._game.legal_answers
        self.close = self._game.close
        self._prompt = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt = prompt
        return self._game.reset(prompt, seed)

    def step(self, text: str) -> StepResult:
        result = self._game.step(text)
        if not result.done or not self._switch.exists():
            return result
        threat = json.loads(self._switch.read_text())
        change = CHANGES[threat["name"]]
        return replace(result, reward=change(result.reward, self._prompt, threat["share"]))
