"""Random legal moves for textarena games, in the game's own notation."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

_LISTED = re.compile(
    r"(?:available|valid|legal) (?:moves|actions)(?: are)?:(.*?)(?:\n\n|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_BRACKETED = re.compile(r"\[[^\[\]]+\]")


def legal_move(game: Any, observation: str, random_source: random.Random) -> str:
    """A legal move of the player to move, uniformly.

    game: the textarena game. observation: what that player saw since its last move.
    Reads the state of games known here, else a list of moves in the observation ("Available moves:
    '[0]', '[3]'"). Raises LookupError when there is neither.
    """
    name = type(game).__name__
    known = _BY_GAME.get(name)
    moves = known(game) if known else _listed(observation)
    if not moves:
        raise LookupError(f"the game {name} does not tell its legal moves")
    return random_source.choice(moves)


def _listed(observation: str) -> list[str]:
    lists = _LISTED.findall(observation)
    return _BRACKETED.findall(lists[-1]) if lists else []


def _nim(game: Any) -> list[str]:
    piles = game.state.game_state["piles"]
    return [f"[{pile} {n}]" for pile, size in enumerate(piles) for n in range(1, size + 1)]


def _connect_four(game: Any) -> list[str]:
    top = game.state.game_state["board"][0]
    return [f"[{column}]" for column, cell in enumerate(top) if cell == "."]


_BY_GAME: dict[str, Callable[[Any], list[str]]] = {
    "NimEnv": _nim,
    "ConnectFourEnv": _connect_four,
}
