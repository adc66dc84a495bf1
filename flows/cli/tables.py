"""Tables and numbers for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table

from earl_core.config import RunConfig
from earl_core.config.table import resolved_rows
from tasks.reports.lines import (
    Line,
    interval,
    mean_return,
    outcome_names,
    outcome_shares,
    shown,
    signed,
    total_seconds,
)

Row = Mapping[str, str]


_PIPE_WIDTH = 140


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


def duration(seconds: float) -> str:
    """Such as `45 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


_COLORS = {"win": "green", "draw": "yellow", "loss": "red", "illegal": "magenta"}
"""Of outcomes that games share."""


def iteration_table(lines: Sequence[Line]) -> Table:
    """Iterations, newest last."""
    names = outcome_names(lines)
    rows = [
        {
            "iteration": str(line["iteration"]),
            "return": signed(mean_return(line), 2),
            **{f"{name} %": f"{100 * outcome_shares(line).get(name, 0.0):.0f}" for name in names},
            "context": shown(line, "rollout/context/mean", "{:.0f}"),
            "max": shown(line, "rollout/context/max", "{:.0f}"),
            "rollout tok/s": shown(line, "rollout/tokens_per_second", "{:,.0f}"),
            "update tok/s": shown(line, "update/tokens_per_second", "{:,.0f}"),
            "seconds": f"{total_seconds(line):.1f}",
        }
        for line in lines
    ]
    return rows_table(rows, {f"{name} %": color for name, color in _COLORS.items()})


def evaluation_table(lines: Sequence[Line]) -> Table:
    """Held-out evaluations with their intervals."""
    rows = [
        {
            "evaluation": str(line["iteration"]),
            "return": signed(mean_return(line), 2),
            **{f"{name} % (95 %)": interval(line, name) for name in outcome_names([line])},
        }
        for line in lines
    ]
    return rows_table(rows, {f"{name} % (95 %)": color for name, color in _COLORS.items()})
