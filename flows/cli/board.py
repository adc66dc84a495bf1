"""Boards of the built-in games on a terminal, found in the text that the model sees."""

from __future__ import annotations

import itertools

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_STYLES = {"X": "bold green", "O": "bold red"}
_LEAST_ROWS, _LEAST_CELLS = 2, 3


def find_board(text: str) -> list[list[str]] | None:
    """The cells of the board in an observation, row by row; None when it shows none.

    Knows both styles of the games: lines of single characters with blanks between them, and rows
    joined by `|`.
    """
    if "\n" in text.strip():
        rows = [line.split() for line in text.splitlines()]
    else:
        rows = [list(row.strip("! ")) for row in text.split("|")]
    together = [list(group) for fits, group in itertools.groupby(rows, _is_row) if fits]
    board = max(together, key=len, default=[])
    even = len({len(row) for row in board}) == 1
    return board if even and len(board) >= _LEAST_ROWS else None


def _is_row(cells: list[str]) -> bool:
    return len(cells) >= _LEAST_CELLS and all(len(cell) == 1 for cell in cells)


def _panel(rows: list[list[str]]) -> Panel:
    """The board with colored stones; free squares and column numbers are dim."""
    grid = Table.grid(padding=(0, 1))
    for row in rows:
        grid.add_row(*[Text(cell, style=_STYLES.get(cell, "dim")) for cell in row])
    return Panel(grid, expand=False, padding=(0, 1))


def show(console: Console, text: str) -> None:
    """Print an observation: its board if it has one, else its text."""
    rows = find_board(text)
    console.print(_panel(rows) if rows else Text(text.strip(), style="dim"))
