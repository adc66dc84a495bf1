"""Tables and numbers for a terminal; what iterations and evaluations came to.

An iteration is a line of metrics.jsonl: its number under `iteration`, its metrics as `stage/name`.
An evaluation is the same with its own metrics, and `iteration` counts those done before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from earl_core.config import RunConfig
from earl_core.config.table import resolved_rows
from earl_core.system.plural import plural
from flows.cli.fitting import FittingTable, Row

_PIPE_WIDTH = 140


_LONG = 1e6


def make_console(quiet: bool = False) -> Console:
    """Standard output; pipes and logs get lines that are wide enough for every table.

    quiet: nothing of it is shown.
    """
    console = Console(highlight=False, quiet=quiet)
    if console.is_terminal:
        return console
    return Console(highlight=False, quiet=quiet, width=_PIPE_WIDTH)


def resolved_table(config: RunConfig) -> FittingTable:
    """What the sizes of a configuration come to."""
    names = ("what", "value", "from")
    rows = [dict(zip(names, row, strict=True)) for row in resolved_rows(config)]
    styles = {"what": "bold", "value": "cyan", "from": "dim"}
    return FittingTable(rows, styles, title=f"Run {config.name}")


def rows_table(rows: Sequence[Row], styles: Mapping[str, str] | None = None) -> FittingTable:
    """Rows as a table of all columns in which any of them has something."""
    return FittingTable(rows, styles)


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


Line = Mapping[str, Any]

_COLORS = {"win": "green", "draw": "yellow", "loss": "red", "illegal": "magenta"}
"""The outcomes that are shown first, in this order, whatever others an environment has."""

_OUTCOME = re.compile("rollout/outcome/(.+)|outcome/(.+)/share")

_LIMITS = {
    "max_turns": "turn limit",
    "max_tokens": "token limit",
    "model_context": "model's context",
}
"""What may end an episode besides its environment, by finish reason."""


def mean_return(line: Line) -> float | None:
    """The mean return of an iteration or an evaluation; None where it was not measured."""
    names = ("rollout/return/mean", "reward/mean", "return/mean")
    return next((float(line[name]) for name in names if name in line), None)


def outcome_shares(line: Line) -> dict[str, float]:
    """The share of each outcome, in [0, 1]."""
    named = {name: _OUTCOME.fullmatch(name) for name in line}
    return {found[1] or found[2]: float(line[name]) for name, found in named.items() if found}


def outcome_names(lines: Sequence[Line]) -> list[str]:
    """All outcomes that occur, the games' first."""
    found = {name for line in lines for name in outcome_shares(line)}
    return [name for name in _COLORS if name in found] + sorted(found - set(_COLORS))


def limit_shares(line: Line) -> dict[str, float]:
    """The share of the episodes that each limit has ended, where it has ended any."""
    shares = {
        name: max(float(line.get(f"{stage}finish/{reason}", 0.0)) for stage in ("rollout/", ""))
        for reason, name in _LIMITS.items()
    }
    return {name: share for name, share in shares.items() if share}


def _limit_texts(line: Line) -> list[str]:
    return [
        f"{100 * share:.0f} % ended by the {name}" for name, share in limit_shares(line).items()
    ]


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


def iteration_text(line: Line) -> str:
    """An iteration's numbers in one line."""
    shares = outcome_shares(line)
    parts = [
        _return_text(line),
        *(f"{name} {100 * shares[name]:.0f} %" for name in outcome_names([line])),
        *_limit_texts(line),
        _shown(line, "rollout/context/mean", "context {:.0f}"),
        _shown(line, "rollout/context/max", "max {:.0f}"),
        _shown(line, "rollout/tokens_per_second", "rollout {:,.0f} tokens/s"),
        _shown(line, "update/tokens_per_second", "update {:,.0f} tokens/s"),
        f"{_seconds(line):.1f} s",
    ]
    return ", ".join(part for part in parts if part)


def iteration_table(lines: Sequence[Line]) -> FittingTable:
    """Iterations, newest last; what matters most stands to the left."""
    names, limits = outcome_names(lines), _limits(lines)
    rows = [
        {
            "iteration": str(line["iteration"]),
            "return": signed(mean_return(line), 2),
            **{f"{name} %": f"{100 * outcome_shares(line).get(name, 0.0):.0f}" for name in names},
            **{f"{name} %": f"{100 * limit_shares(line).get(name, 0.0):.0f}" for name in limits},
            "context": _shown(line, "rollout/context/mean", "{:.0f}"),
            "max": _shown(line, "rollout/context/max", "{:.0f}"),
            "rollout tok/s": _shown(line, "rollout/tokens_per_second", "{:,.0f}"),
            "update tok/s": _shown(line, "update/tokens_per_second", "{:,.0f}"),
            "seconds": f"{_seconds(line):.1f}",
        }
        for line in lines
    ]
    styles = {f"{name} %": color for name, color in _COLORS.items()}
    return FittingTable(rows, styles, drop=True)


def _limits(lines: Sequence[Line]) -> list[str]:
    """Those that have ended an episode."""
    found = {name for line in lines for name in limit_shares(line)}
    return [name for name in _LIMITS.values() if name in found]


def evaluation_text(line: Line) -> str:
    """An evaluation in one line."""
    parts = [
        _return_text(line),
        *(f"{name} {_interval(line, name)} %" for name in outcome_names([line])),
        *_limit_texts(line),
    ]
    told = ", ".join(part for part in parts if part)
    return f"evaluation after {plural(line['iteration'], 'iteration')}: {told}"


def evaluation_table(lines: Sequence[Line]) -> FittingTable:
    """Held-out evaluations with their intervals."""
    names, limits = outcome_names(lines), _limits(lines)
    rows = [
        {
            "evaluation": str(line["iteration"]),
            "return": signed(mean_return(line), 2),
            **{f"{name} % (95 %)": _interval(line, name) for name in names},
            **{f"{name} %": f"{100 * limit_shares(line).get(name, 0.0):.0f}" for name in limits},
        }
        for line in lines
    ]
    styles = {f"{name} % (95 %)": color for name, color in _COLORS.items()}
    return FittingTable(rows, styles, drop=True)


def _return_text(line: Line) -> str:
    text = signed(mean_return(line), 3)
    return f"return {text}" if text else ""


def _interval(line: Line, outcome: str) -> str:
    """A share with its 95 % interval in per cent, such as `48 (42-54)`."""
    if f"outcome/{outcome}/share" not in line:
        return ""
    parts = (float(line[f"outcome/{outcome}/{part}"]) for part in ("share", "low", "high"))
    share, low, high = (100 * part for part in parts)
    return f"{share:.0f} ({low:.0f}-{high:.0f})"


def _shown(line: Line, name: str, form: str) -> str:
    return form.format(line[name]) if name in line else ""


def _seconds(line: Line) -> float:
    return sum(float(value) for name, value in line.items() if name.endswith("/stage_seconds"))
