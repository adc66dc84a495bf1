"""Random legal moves for textarena games, in the game's own notation.

A game names the forms of its moves here, or lists its legal moves to the player; which of them are
legal now, the game says itself, on a copy.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

_LISTED = re.compile(
    r"(?:available|valid|legal) (?:moves|actions)(?: are)?:(.*?)(?:\n\n|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_BRACKETED = re.compile(r"\[[^\[\]]+\]")
_CARDS = ("a", "k", "q", "j", *map(str, range(10, 1, -1)))


def legal_move(game: Any, observation: str, random_source: random.Random) -> str:
    """A legal move of the player to move, uniformly.

    game: the textarena game, which stays as it is; the global random state does not.
    observation: what that player saw since its last move ("Available moves: '[0]', '[3]'").
    Raises LookupError when the game neither has forms here nor lists its moves.
    """
    name = type(game).__name__
    forms = _FORMS.get(name)
    moves = sorted(set(forms(game, random_source) if forms else _listed(observation)))
    random_source.shuffle(moves)
    for move in moves:
        if _accepts(game, move):
            return move
    raise LookupError(f"the game {name} does not tell its legal moves")


def _accepts(game: Any, move: str) -> bool:
    state = game.state
    # What was said so far grows, and decides nothing.
    unsaid = {id(state.observations): {n: [] for n in state.observations}, id(state.logs): []}
    trial = copy.deepcopy(game, unsaid)
    player = trial.state.current_player_id
    trial.state.error_allowance = 0
    try:
        trial.step(move)
    except Exception:  # a game's own mistake, which must not be made in earnest
        return False
    return not trial.state.game_info[player]["invalid_move"]


def _listed(observation: str) -> list[str]:
    lists = _LISTED.findall(observation)
    return _BRACKETED.findall(lists[-1]) if lists else []


def _nim(game: Any, _: random.Random) -> Iterable[str]:
    piles = game.state.game_state["piles"]
    return (f"[{pile} {n}]" for pile, size in enumerate(piles) for n in range(1, size + 1))


def _connect_four(game: Any, _: random.Random) -> Iterable[str]:
    return (f"[{column}]" for column in range(len(game.state.game_state["board"][0])))


def _steps(size: int, reach: int, form: str) -> Iterable[str]:
    """Along lines of a square board, at most `reach` far."""
    for column, row, right, up in product(range(size), range(size), (-1, 0, 1), (-1, 0, 1)):
        for far in range(1, reach + 1):
            to = (column + far * right, row + far * up)
            if all(0 <= each < size for each in to):
                yield form.format(f"{chr(97 + column)}{row + 1}", f"{chr(97 + to[0])}{to[1] + 1}")


def _blotto(game: Any, random_source: random.Random) -> Iterable[str]:
    cuts = sorted(random_source.choices(range(game.num_total_units + 1), k=game.num_fields - 1))
    ends = zip([0, *cuts], [*cuts, game.num_total_units], strict=True)
    units = (high - low for low, high in ends)
    yield f"[{' '.join(f'{n}{u}' for n, u in zip(game.field_names, units, strict=True))}]"


def _liars_dice(game: Any, _: random.Random) -> Iterable[str]:
    yield "[call]"
    dice = sum(game.state.game_state["remaining_dice"].values())
    yield from (f"[bid: {n}, {face}]" for n in range(1, dice + 1) for face in range(1, 7))


def _golf(game: Any, _: random.Random) -> Iterable[str]:
    yield from ("[draw]", "[take]", "[discard]", "[knock]")
    places = product(range(1, game.num_rows + 1), range(1, game.num_columns + 1))
    yield from (f"[{verb} {row} {column}]" for row, column in places for verb in ("swap", "peek"))


def _prisoners(game: Any, _: random.Random) -> Iterable[str]:
    others = [each for each in range(3) if each != game.state.current_player_id]
    for choices in product(("cooperate", "defect"), repeat=2):
        yield " ".join(f"[{n} {word}]" for n, word in zip(others, choices, strict=True))


def _ranges(form: str, *sizes: int | str, start: int = 0) -> Callable[..., Iterable[str]]:
    """Numbers from `start` on put into the form; a text is the attribute with their count."""

    def moves(game: Any, _: random.Random) -> Iterable[str]:
        counts = [getattr(game, size) if isinstance(size, str) else size for size in sizes]
        return (form.format(*each) for each in product(*(range(start, start + n) for n in counts)))

    return moves


def _words(*words: str) -> Callable[..., Iterable[str]]:
    return lambda game, _: [f"[{word}]" for word in words]


_FORMS: dict[str, Callable[[Any, random.Random], Iterable[str]]] = {
    "AlquerqueEnv": lambda game, _: _steps(5, 2, "[{} {}]"),
    "BattleshipEnv": lambda game, _: (
        f"[{chr(65 + row)}{column}]"
        for row, column in product(range(game.grid_size), range(game.grid_size))
    ),
    "BreakthroughEnv": lambda game, _: _steps(game.board_size, 1, "[{}{}]"),
    "BriscolaEnv": _ranges("[play {}]", 3, start=1),
    "ChopsticksEnv": lambda game, _: (
        f"[{verb} {one} {two}]"
        for verb, one, two in product(("attack", "split"), range(10), range(10))
    ),
    "ColonelBlottoEnv": _blotto,
    "ConnectFourEnv": _connect_four,
    "GameOfPureStrategyEnv": _words(*_CARDS),
    "GermanWhistEnv": _ranges("[play {}]", 13, start=1),
    "GolfEnv": _golf,
    "HighSocietyEnv": _ranges("[{}]", 11, start=1),
    "IndianPokerEnv": _words("check", "call", "fold", "bet 1", "bet 5", "raise 1", "raise 5"),
    "IteratedMatchingPenniesEnv": _words("heads", "tails"),
    "IteratedPrisonersDilemmaEnv": _words("cooperate", "defect"),
    "IteratedRockPaperScissorsEnv": _words("rock", "paper", "scissors"),
    "IteratedTwoThirdsAverageEnv": _ranges("[{}]", 101),
    "IteratedUltimatumGameEnv": lambda game, _: [
        *(f"[Offer: ${amount}]" for amount in range(game.pool + 1)),
        "[Accept]",
        "[Reject]",
    ],
    "LiarsDiceEnv": _liars_dice,
    "LinesOfActionEnv": lambda game, _: _steps(8, 7, "[{} {}]"),
    "MarketEntryGameEnv": _words("E", "S"),
    "MemoryGameEnv": _ranges("[{} {} {} {}]", *["grid_size"] * 4),
    "NimEnv": _nim,
    "OthelloEnv": _ranges("[{}, {}]", "N", "N"),
    "PokerEnv": _words("check", "call", "fold", "bet 10", "bet 50", "raise 10", "raise 50"),
    "PublicGoodsGameEnv": _ranges("[{}]", 21),
    "QuantumTicTacToeEnv": _ranges("[{},{}]", 9, 9),
    "SantoriniBaseFixedWorkerEnv": lambda game, _: _BRACKETED.findall(
        str(game._get_valid_moves(game.state.current_player_id))
    ),
    "SecretMafiaEnv": lambda game, _: (f"[{n}]" for n in range(game.state.num_players)),
    "SimpleBlindAuctionEnv": _ranges("[Bid on Item {}: {}]", "num_items", 200, start=0),
    "SimpleNegotiationEnv": lambda game, _: [
        "[Accept]",
        "[Deny]",
        *(
            f"[Offer: 1 {one} -> 1 {two}]"
            for one, two in product(game.resource_names, game.resource_names)
        ),
    ],
    "SnakeEnv": _words("up", "down", "left", "right"),
    "SurroundEnv": _words("up", "down", "left", "right"),
    "ThreePlayerGOPSEnv": _words(*_CARDS),
    "ThreePlayerIPDEnv": _prisoners,
    "TruthAndDeceptionEnv": _words("Fact 1", "Fact 2"),
    "TwoDollarEnv": lambda game, _: [
        *(f"[Propose] ${cents / 100:.2f}" for cents in range(0, 201, 10)),
        "[Accept]",
        "[Reject]",
    ],
    "UltimateTicTacToeEnv": _ranges("[{} {}]", 9, 9),
}
