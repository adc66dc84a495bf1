"""Opponents for two-player board games: random, greedy, and search.

All of them draw from the `random.Random` they are given, so that a seeded episode is repeatable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

StateT = TypeVar("StateT", bound=Hashable)

OpponentName = Literal["random", "greedy", "perfect"]

WIN_SCORE = 1_000_000
"""Search score of a won position; a win counts the less, the more plies it took."""


class Rules(Protocol[StateT]):
    """Rules of a two-player game with perfect information. States are immutable and hashable."""

    def __hash__(self) -> int: ...

    def start(self) -> StateT: ...

    def moves(self, state: StateT) -> Sequence[int]:
        """Legal moves, best guesses first; empty when the board is full."""
        ...

    def play(self, state: StateT, move: int) -> StateT: ...

    def to_move(self, state: StateT) -> int:
        """The player to move: 0 (moved first) or 1."""
        ...

    def winner(self, state: StateT) -> int | None:
        """The player whose last move won, or None."""
        ...

    def winning_moves(self, state: StateT, player: int) -> list[int]:
        """Legal moves that would complete a line if `player` made them now, on turn or not."""
        ...

    def plies(self, state: StateT) -> int:
        """Moves played so far by both."""
        ...

    def evaluate(self, state: StateT) -> int:
        """A guess at the value for the player to move, far smaller than `WIN_SCORE`."""
        ...


Opponent = Callable[[Any, random.Random], int]
"""Chooses a legal move of a state."""


def make_opponent(name: OpponentName, rules: Rules[Any], depth: int | None) -> Opponent:
    """The opponent called `name`.

    random: a legal move, uniformly. greedy: wins if it can at once, else blocks such a win, else
    moves at random. perfect: a move with the best alpha-beta value, uniformly among equals; depth:
    plies that it looks ahead, None for those to the end.
    """

    def moves(state: Any) -> Sequence[int]:
        if name == "perfect":
            return best_moves(rules, state, depth)
        if name == "random":
            return rules.moves(state)
        mine = rules.to_move(state)
        wins = rules.winning_moves(state, mine) or rules.winning_moves(state, 1 - mine)
        return wins or rules.moves(state)

    return lambda state, source: source.choice(sorted(moves(state)))


@lru_cache(maxsize=65_536)
def best_moves(rules: Rules[Any], state: Any, depth: int | None) -> tuple[int, ...]:
    """All moves of the best value, sorted. Cached: games of one run open alike."""
    remaining = WIN_SCORE if depth is None else depth
    table: dict[tuple[Any, int], tuple[int, int]] = {}
    best, chosen = -WIN_SCORE, []
    for move in rules.moves(state):
        after = rules.play(state, move)
        # The window reaches one below the best, so that equal moves get their exact value.
        value = -_search(rules, after, remaining - 1, -WIN_SCORE, -(best - 1), table)
        if value > best:
            best, chosen = value, [move]
        elif value == best:
            chosen.append(move)
    return tuple(sorted(chosen))


def _search(
    rules: Rules[Any],
    state: Any,
    remaining: int,
    alpha: int,
    beta: int,
    table: dict[tuple[Any, int], tuple[int, int]],
) -> int:
    """Fail-soft negamax value of `state` for the player to move (Knuth & Moore 1975). table:
    (state, remaining) -> (lower, upper) bounds of the value."""
    if rules.winner(state) is not None:
        return rules.plies(state) - WIN_SCORE
    moves = rules.moves(state)
    if not moves:
        return 0
    if remaining <= 0:
        return rules.evaluate(state)
    lower, upper = table.get((state, remaining), (-WIN_SCORE, WIN_SCORE))
    if lower >= beta or lower == upper:
        return lower
    if upper <= alpha:
        return upper
    best, floor = -WIN_SCORE, alpha
    for move in moves:
        after = rules.play(state, move)
        value = -_search(rules, after, remaining - 1, -beta, -floor, table)
        best, floor = max(best, value), max(floor, value)
        if floor >= beta:
            break
    if best >= beta:
        table[(state, remaining)] = (best, upper)
    elif best <= alpha:
        table[(state, remaining)] = (lower, best)
    else:
        table[(state, remaining)] = (best, best)
    return best
