"""Tic-tac-toe against a random, greedy or perfect opponent."""

from __future__ import annotations

from typing import ClassVar

from earl_core.environments.games.board_game import MARKS, BoardGame, BoardGameOptions

_LINES = (
    (0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6),
)  # fmt: skip
_EMPTY = "."


class TicTacToeRules:
    """States are nine characters of ".XO", row by row."""

    def start(self) -> str:
        return _EMPTY * 9

    def moves(self, state: str) -> list[int]:
        return [cell for cell in range(9) if state[cell] == _EMPTY]

    def play(self, state: str, move: int) -> str:
        return state[:move] + MARKS[self.to_move(state)] + state[move + 1 :]

    def to_move(self, state: str) -> int:
        return self.plies(state) % 2

    def winner(self, state: str) -> int | None:
        for a, b, c in _LINES:
            if state[a] != _EMPTY and state[a] == state[b] == state[c]:
                return MARKS.index(state[a])
        return None

    def winning_moves(self, state: str, player: int) -> list[int]:
        mark = MARKS[player]
        return [
            move
            for move in self.moves(state)
            if self.winner(state[:move] + mark + state[move + 1 :]) is not None
        ]

    def plies(self, state: str) -> int:
        return 9 - state.count(_EMPTY)

    def evaluate(self, state: str) -> int:
        return 0


RULES = TicTacToeRules()


class TicTacToe(BoardGame[str]):
    """Squares are numbered 1 to 9, row by row; free squares show their number.

    Compact style: rows joined by "|", such as `X2O|4X6|789`; a refused answer is followed by the
    same board with "!" in front. Whose turn it is follows from the marks: X moves first.
    """

    name: ClassVar[str] = "tic_tac_toe"
    compact_characters: ClassVar[str] = "!123456789OX|"
    options_model: ClassVar[type[BoardGameOptions]] = BoardGameOptions

    def __init__(self, options: BoardGameOptions | None = None) -> None:
        super().__init__(RULES, options or BoardGameOptions(), depth=None)

    def rules_text(self) -> str:
        return (
            "You play tic-tac-toe. Three in a row wins. Free squares show their number. "
            "Answer with the number of a free square in brackets, like [5]."
        )

    def board_text(self, state: str) -> str:
        cells = [str(i + 1) if cell == _EMPTY else cell for i, cell in enumerate(state)]
        return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))

    def compact_text(self, state: str) -> str:
        return self.board_text(state).replace(" ", "").replace("\n", "|")
