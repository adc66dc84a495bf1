"""Tables and numbers for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from earl_core.config import RunConfig
from earl_core.config.table import resolved_rows
from flows.cli.responsive_tables import FittingTable, Row
from flows.cli.terminal import ReadableConsole
from tasks.reports.lines import (
    Line,
    interval,
    limit_names,
    limit_shares,
    mean_return,
    outcome_names,
    outcome_shares,
    shown,
    signed,
    total_seconds,
)

_PIPE_WIDTH = 140


def make_console(quiet: bool = False) -> Console:
    """Standard output; pipes and logs get lines that are wide enough for every table.

    Texts are printed as they are, but for what steers a terminal: paths and answers may hold
    brackets, which rich takes for markup.
    quiet: nothing of it is shown.
    """
    options: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "quiet": quiet}
    console = ReadableConsole(**options)
    return console if console.is_terminal else ReadableConsole(**options, width=_PIPE_WIDTH)


def resolved_table(config: RunConfig) -> FittingTable:
    """Tabulate the sizes that a configuration comes to."""
    names = ("what", "value", "from")
    rows = [dict(zip(names, row, strict=True)) for row in resolved_rows(config)]
    styles = {"what": "bold", "value": "cyan", "from": "dim"}
    return FittingTable(rows, styles, title=f"Run {config.name}")


def rows_table(rows: Sequence[Row], styles: Mapping[str, str] | None = None) -> FittingTable:
    """Rows as a table of all columns in which any of them has something."""
    return FittingTable(rows, styles)


def duration(seconds: float) -> str:
    """Write a duration, such as `45 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


_COLORS = {"win": "green", "draw": "yellow", "loss": "red", "illegal": "magenta"}
"""Colors of outcomes that games share."""


def json_line(line: Line, stage: str = "") -> str:
    """An iteration or an evaluation (`stage`) as one line of JSON: its kind, number, return and
    outcomes beside all its metrics."""
    kind = "evaluation" if stage == "evaluation" else "iteration"
    numbers = {name: value for name, value in line.items() if name not in ("iteration", "time")}
    told = {
        "kind": kind,
        "iteration": line["iteration"],
        "return": mean_return(line),
        "outcomes": outcome_shares(line),
        "metrics": numbers,
    }
    return json.dumps(told)


def iteration_table(lines: Sequence[Line]) -> FittingTable:
    """Iterations, newest last; what matters most stands to the left."""
    names, limits = outcome_names(lines), limit_names(lines)
    rows = [
        {
            "iteration": str(line["iteration"]),
            "return": signed(mean_return(line), 2),
            **{f"{name} %": f"{100 * outcome_shares(line).get(name, 0.0):.0f}" for name in names},
            **{f"{name} %": f"{100 * limit_shares(line).get(name, 0.0):.0f}" for name in limits},
            "context": shown(line, "rollout/context/mean", "{:.0f}"),
            "max": shown(line, "rollout/context/max", "{:.0f}"),
            "rollout tok/s": shown(line, "rollout/tokens_per_second", "{:,.0f}"),
            "update tok/s": shown(line, "update/tokens_per_second", "{:,.0f}"),
            "seconds": f"{total_seconds(line):.1f}",
        }
        for line in lines
    ]
    styles = {f"{name} %": color for name, color in _COLORS.items()}
    return FittingTable(rows, styles, drop=True)


def evaluation_table(lines: Sequence[Line]) -> FittingTable:
    """Held-out evaluations with their intervals."""
    names, limits = outcome_names(lines), limit_names(lines)
    rows = [
        {
            "evaluation": str(line["iteration"]),
            "return": signed(mean_return(line), 2),
            **{f"{name} % (95 %)": interval(line, name) for name in names},
            **{f"{name} %": f"{100 * limit_shares(line).get(name, 0.0):.0f}" for name in limits},
        }
        for line in lines
    ]
    styles = {f"{name} % (95 %)": color for name, color in _COLORS.items()}
    return FittingTable(rows, styles, drop=True)
