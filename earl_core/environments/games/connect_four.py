"""Connect four, 6 rows by 7 columns, against a random, greedy or depth-limited perfect opponent."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from earl_core.environments.games.board_game import MARKS, BoardGame, BoardGameOptions

ROWS, COLUMNS = 6, 7

# Bitboards with one spare bit on top of each column (Tromp's layout): cell (row, column), row 0 at
# the bottom, is bit column * 7 + row. The spare bit keeps shifted lines from wrapping around.
_HEIGHT = ROWS + 1
_BOTTOM = sum(1 << (column * _HEIGHT) for column in range(COLUMNS))
_CELLS = _BOTTOM * ((1 << ROWS) - 1)
_CENTER_FIRST = (3, 2, 4, 1, 5, 0, 6)
_TOPS = tuple(1 << (column * _HEIGHT + ROWS - 1) for column in range(COLUMNS))
_BOTTOMS = tuple(1 << (column * _HEIGHT) for column in range(COLUMNS))
_COLUMN_CELLS = tuple(((1 << ROWS) - 1) << (column * _HEIGHT) for column in range(COLUMNS))
_MIDDLE = _COLUMN_CELLS[3]
_DIRECTIONS = (_HEIGHT, _HEIGHT - 1, _HEIGHT + 1)


class Position(NamedTuple):
    """Stones of the player to move, and of both."""

    mine: int
    both: int


def _four(stones: int) -> bool:
    for shift in (1, *_DIRECTIONS):
        pairs = stones & (stones >> shift)
        if pairs & (pairs >> 2 * shift):
            return True
    return False


def _completing_cells(stones: int, both: int) -> int:
    """Free cells, reachable now or later, that would make four of `stones` (Pons 2015)."""
    cells = (stones << 1) & (stones << 2) & (stones << 3)
    for shift in _DIRECTIONS:
        right, left = (
            (stones << shift) & (stones << 2 * shift),
            (stones >> shift) & (stones >> 2 * shift),
        )
        cells |= right & ((stones << 3 * shift) | (stones >> shift))
        cells |= left & ((stones >> 3 * shift) | (stones << shift))
    return cells & _CELLS & ~both


class ConnectFourRules:
    """States are `Position`s; a move is a column, 0 to 6."""

    def start(self) -> Position:
        return Position(0, 0)

    def moves(self, state: Position) -> list[int]:
        both = state.both
        return [column for column in _CENTER_FIRST if not both & _TOPS[column]]

    def play(self, state: Position, move: int) -> Position:
        mine, both = state
        # Adding the bottom bit carries to the lowest free cell of the column.
        return Position(mine ^ both, both | (both + _BOTTOMS[move]))

    def to_move(self, state: Position) -> int:
        return state.both.bit_count() % 2

    def winner(self, state: Position) -> int | None:
        return 1 - self.to_move(state) if _four(state.mine ^ state.both) else None

    def winning_moves(self, state: Position, player: int) -> list[int]:
        mine, both = state
        stones = mine if player == self.to_move(state) else mine ^ both
        landing = _completing_cells(stones, both) & (both + _BOTTOM)
        return [column for column in range(COLUMNS) if landing & _COLUMN_CELLS[column]]

    def plies(self, state: Position) -> int:
        return state.both.bit_count()

    def evaluate(self, state: Position) -> int:
        """Cells that would complete a four count 8, stones in the middle column 1."""
        mine, both = state
        theirs = mine ^ both
        threats = _completing_cells(mine, both).bit_count()
        threats -= _completing_cells(theirs, both).bit_count()
        return 8 * threats + (mine & _MIDDLE).bit_count() - (theirs & _MIDDLE).bit_count()


RULES = ConnectFourRules()


class ConnectFourOptions(BoardGameOptions):
    """Adds the search depth, because nobody searches connect four to its end in passing.
    opponent_depth: plies that the perfect opponent looks ahead, 1 to 12."""

    opponent_depth: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.opponent_depth <= 12:
            raise ValueError(f"opponent_depth is {self.opponent_depth}: give 1 to 12")


class ConnectFour(BoardGame[Position]):
    """A move is a column, 1 to 7; the top line shows the columns that are not full.

    Compact style: that line, then the rows from the highest occupied one down, joined by "|", such
    as `1234567|..X....|.OX....`; a full column shows "-".
    """

    name: ClassVar[str] = "connect_four"
    compact_characters: ClassVar[str] = "!-.1234567OX|"
    options_model: ClassVar[type[BoardGameOptions]] = ConnectFourOptions

    def __init__(self, options: ConnectFourOptions | None = None) -> None:
        options = options or ConnectFourOptions()
        super().__init__(RULES, options, depth=options.opponent_depth)

    def rules_text(self) -> str:
        return (
            "You play connect four. A stone falls to the lowest free row of its column; four in a "
            "row, column or diagonal win. Columns with room show their number on top. "
            "Answer with the number of a column in brackets, like [4]."
        )

    def board_text(self, state: Position) -> str:
        return "\n".join(" ".join(line) for line in _lines(state))

    def compact_text(self, state: Position) -> str:
        return "|".join(_lines(state))


def _lines(state: Position) -> list[str]:
    """The columns' numbers, then the rows from the highest occupied one down."""
    first = state.mine if state.both.bit_count() % 2 == 0 else state.mine ^ state.both
    open_columns = set(RULES.moves(state))
    lines = ["".join(str(c + 1) if c in open_columns else "-" for c in range(COLUMNS))]
    for row in reversed(range(ROWS)):
        cells = [1 << (column * _HEIGHT + row) for column in range(COLUMNS)]
        if any(state.both & cell for cell in cells):
            lines.append(
                "".join(
                    "." if not state.both & cell else MARKS[0 if first & cell else 1]
                    for cell in cells
                )
            )
    return lines
