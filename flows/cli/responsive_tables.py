"""Tables and lines with a bar that fit a terminal of any width, also one that is resized.

A table of measurements leaves out columns from the right. Any other table must lose nothing: where
its columns do not fit, each row becomes a block of lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Row = Mapping[str, str]

_NUMERIC = re.compile(
    r"[-+]?[\d,.]*(e[-+]\d+)?%?( \([\d-]+\)| - [\d.]+%| [%KMGTik]*B?| [sh]| (min|h) \d+ (s|min))?"
)

_GAP = 2
_LEAST_TEXT = 18
"""Texts are wrapped down to this width."""

_LEAST_BAR = 8


class FittingTable:
    """Rows as a table of all columns in which any of them has something; numbers to the right.
    title: a line above. drop: leave out columns from the right, instead of changing the form."""

    def __init__(
        self,
        rows: Sequence[Row],
        styles: Mapping[str, str] | None = None,
        *,
        title: str = "",
        drop: bool = False,
    ) -> None:
        self._rows, self._styles, self._title, self._drop = rows, styles or {}, title, drop
        names = dict.fromkeys(name for row in rows for name, cell in row.items() if cell)
        self._numeric = {
            name: all(_NUMERIC.fullmatch(row.get(name, "")) for row in rows) for name in names
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, width = list(self._numeric), options.max_width
        while self._drop and len(columns) > 1 and self._least(columns) > width:
            columns.pop()
        if self._title:
            yield Text(self._title, style="bold")
        if not self._drop and self._least(columns) > width:
            yield from self._blocks()
        else:
            yield self._table(columns)

    def _least(self, columns: Sequence[str]) -> int:
        """The width that these columns take at least."""
        return sum(self._width(name) for name in columns) + _GAP * (len(columns) - 1)

    def _width(self, name: str) -> int:
        cells = (row.get(name, "") for row in self._rows)
        longest = max(map(cell_len, (name, *cells)))
        return longest if self._numeric[name] else min(longest, _LEAST_TEXT)

    def _table(self, columns: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
        for name in columns:
            numeric = self._numeric[name]
            table.add_column(
                name,
                justify="right" if numeric else "left",
                no_wrap=numeric,
                min_width=self._width(name),
                style=self._styles.get(name, ""),
                overflow="fold",
            )
        for row in self._rows:
            table.add_row(*(row.get(name, "") for name in columns))
        return table

    def _blocks(self) -> RenderResult:
        for number, row in enumerate(self._rows):
            if number:
                yield Text("")
            for name in self._numeric:
                if cell := row.get(name, ""):
                    style = self._styles.get(name, "")
                    yield Text.assemble((f"{name}: ", "bold"), (cell, style), overflow="fold")


class BarLine:
    """One line: a text, a bar of how much is done where there is room for it, another text. total:
    0: no bar. spinner: turns at the begin of the line."""

    def __init__(
        self,
        before: Text,
        after: Text,
        total: float,
        done: float,
        spinner: RenderableType | None = None,
    ) -> None:
        self._before, self._after, self._spinner = before, after, spinner
        self._total, self._done = total, done

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = [text for text in (self._before, self._after) if text.plain]
        taken = sum(text.cell_len + 1 for text in texts) + (2 if self._spinner else 0)
        room = min(options.max_width - taken, options.max_width // 4, 30)
        line = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [self._before]
        if self._spinner:
            cells.insert(0, self._spinner)
        if self._total and room >= _LEAST_BAR:
            cells.append(ProgressBar(total=self._total, completed=self._done, width=room))
        line.add_row(*cells, self._after)
        yield line
