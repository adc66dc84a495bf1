"""A person in the place of a board game's opponent."""

from __future__ import annotations

import random
from typing import Any

from rich.console import Console

from earl_core.config import RunConfig
from earl_core.environments.games.board_game import MARKS, BoardGame
from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError
from flows.cli.board import show

_GAMES = ("tic_tac_toe", "connect_four")


class Person:
    """Chooses moves by asking on the terminal, in the place of a game's opponent.

    Raises `ConfigError` for environments that are not one of the built-in board games.
    """

    def __init__(self, console: Console, config: RunConfig) -> None:
        name = config.environment.name
        game = create(name, config.environment.options) if name in _GAMES else None
        if not isinstance(game, BoardGame):
            raise ConfigError(
                f"--me works for {' and '.join(_GAMES)}, not for {name!r}",
                remedy="leave it out to watch the agent play",
            )
        self.console = console
        self.game: BoardGame[Any] = game
        # The games know their opponents by this one attribute; a person is one more of them.
        game._opponent = self._choose

    def begin(self, first: bool) -> None:
        """Say which mark the person plays."""
        mark, order = (MARKS[0], "first") if first else (MARKS[1], "second")
        self.console.print(f"You are {mark} and move {order}. q ends the game.")

    def _choose(self, state: Any, source: random.Random) -> int:
        """The person's move, counted from 0. Raises `EOFError` at the end of the input."""
        show(self.console, self.game.board_text(state))
        legal = sorted(move + 1 for move in self.game._rules.moves(state))
        shown = ", ".join(map(str, legal))
        while True:
            text = self.console.input(f"your move ({shown}): ").strip()
            if text.lower() in ("q", "quit", "exit"):
                raise EOFError
            text = text.strip("[]")
            if text.isascii() and text.isdigit() and int(text) in legal:
                return int(text) - 1
            self.console.print(f"{text!r} is not one of {shown}.")
