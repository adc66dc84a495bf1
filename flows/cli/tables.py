"""Tables and numbers for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table

from earl_core.config import RunConfig
from earl_core.config.table import resolved_rows

Row = Mapping[str, str]

_PIPE_WIDTH = 140
_LONG = 1e6
_NUMERIC = re.compile(
    r"[-+]?[\d,.]*(e[-+]\d+)?%?( \([\d-]+\)| - [\d.]+%| [%KMGTik]*B?| [sh]| (min|h) \d+ (s|min))?"
)


def make_console() -> Console:
    """Standard output; pipes and logs get lines that are wide enough for every table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def resolved_table(config: RunConfig) -> Table:
    """What the sizes of a configuration come to."""
    names = ("what", "value", "from")
    rows = [dict(zip(names, row, strict=True)) for row in resolved_rows(config)]
    table = rows_table(rows, {"what": "bold", "value": "cyan", "from": "dim"})
    table.title, table.title_justify = f"Run {config.name}", "left"
    return table


def rows_table(rows: Sequence[Row], styles: Mapping[str, str] | None = None) -> Table:
    """Rows as a table of all columns in which any of them has something; numbers to the right."""
    columns = dict.fromkeys(name for row in rows for name, cell in row.items() if cell)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numeric = all(_NUMERIC.fullmatch(row.get(column, "")) for row in rows)
        style = (styles or {}).get(column, "")
        justify: JustifyMethod = "right" if numeric else "left"
        table.add_column(column, justify=justify, no_wrap=numeric, style=style, overflow="fold")
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    return table


def signed(value: float | None, places: int) -> str:
    """The value with its sign, or nothing; long numbers in four digits and an exponent."""
    if value is None:
        return ""
    return f"{value:+.4g}" if abs(value) >= _LONG else f"{value:+.{places}f}"


def duration(seconds: float) -> str:
    """Such as `45 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
