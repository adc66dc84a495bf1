"""A person in the place of a board game's opponent."""

from __future__ import annotations

import random
from typing import Any

from rich.console import Console

from earl_core.config import RunConfig
from earl_core.environments.games.board_game import MARKS, BoardGame
from earl_core.environments.registry import create
from flows.cli.board import board_panel, find_board
from flows.cli.errors import UsageProblem

_GAMES = ("tic_tac_toe", "connect_four")


class Person:
    """Chooses moves by asking on the terminal; stands in for a game's opponent."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._game: BoardGame[Any] | None = None
        self._mark = MARKS[1]

    def sit_down(self, game: BoardGame[Any]) -> None:
        """Take the opponent's place in a game."""
        self._game = game
        # The games know their opponents by this one attribute; a person is one more of them.
        game._opponent = self

    def begin(self, first: bool) -> None:
        """Say which mark the person plays."""
        self._mark = MARKS[0] if first else MARKS[1]
        order = "first" if first else "second"
        self.console.print(f"You are {self._mark} and move {order}. q ends the game.")

    def choose(self, state: Any, source: random.Random) -> int:
        """The person's move, counted from 0. Raises `EOFError` at the end of the input."""
        assert self._game is not None, "the person sits at no game"
        rows = find_board(self._game.board_text(state))
        if rows:
            self.console.print(board_panel(rows))
        legal = sorted(move + 1 for move in self._game._rules.moves(state))
        while True:
            text = self._ask(legal)
            if text.isascii() and text.isdigit() and int(text) in legal:
                return int(text) - 1
            self.console.print(f"{text!r} is not one of {', '.join(map(str, legal))}.")

    def _ask(self, legal: list[int]) -> str:
        text = self.console.input(f"your move ({', '.join(map(str, legal))}): ").strip()
        if text.lower() in ("q", "quit", "exit"):
            raise EOFError
        return text.strip("[]")


def person_game(config: RunConfig, person: Person) -> BoardGame[Any]:
    """The run's game with the person in the opponent's place.

    Raises `UsageProblem` for environments that are not one of the built-in board games.
    """
    environment = (
        create(config.environment.name, config.environment.options)
        if (config.environment.name in _GAMES)
        else None
    )
    if not isinstance(environment, BoardGame):
        raise UsageProblem(
            f"--me works for {' and '.join(_GAMES)}, not for {config.environment.name!r}: leave it "
            "out to watch the agent play"
        )
    person.sit_down(environment)
    return environment
