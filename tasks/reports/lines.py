"""The result of an iteration or an evaluation in one line: for terminals, logs and pages.

An iteration is a line of metrics.jsonl: its number under `iteration`, its metrics as `stage/name`.
An evaluation is the same with its own metrics, and `iteration` counts those done before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.system.plural import plural
from tasks.reports.intervals import half_interval

Line = Mapping[str, Any]

FIRST = ("win", "draw", "loss", "illegal")
"""The outcomes that are shown first, in this order, whatever others an environment has."""

_OUTCOME = re.compile("rollout/outcome/(.+)|outcome/(.+)/share")

_LIMITS = {
    "max_turns": "turn limit",
    "max_tokens": "token limit",
    "model_context": "model's context",
}
"""Limits that may end an episode besides its environment, by finish reason."""

_LONG = 1e6

_IMITATED = "demonstrate/episodes"
"""The metric that iterations have that imitate."""


def signed(value: float | None, places: int) -> str:
    """The value with its sign, or nothing; long numbers in four digits and an exponent."""
    if value is None:
        return ""
    return f"{value:+.4g}" if abs(value) >= _LONG else f"{value:+.{places}f}"


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
    return [name for name in FIRST if name in found] + sorted(found - set(FIRST))


def limit_shares(line: Line) -> dict[str, float]:
    """The share of the episodes that each limit has ended, where it has ended any."""
    shares = {
        name: max(float(line.get(f"{stage}finish/{reason}", 0.0)) for stage in ("rollout/", ""))
        for reason, name in _LIMITS.items()
    }
    return {name: share for name, share in shares.items() if share}


def limit_names(lines: Sequence[Line]) -> list[str]:
    """The limits that have ended an episode."""
    found = {name for line in lines for name in limit_shares(line)}
    return [name for name in _LIMITS.values() if name in found]


def _limit_texts(line: Line) -> list[str]:
    return [
        f"{100 * share:.0f} % ended by the {name}" for name, share in limit_shares(line).items()
    ]


def iteration_text(line: Line) -> str:
    """An iteration's numbers in one line."""
    shares = outcome_shares(line)
    parts = [
        _return_text(line),
        *(f"{name} {100 * shares[name]:.0f} %" for name in outcome_names([line])),
        *_limit_texts(line),
        shown(line, "update/loss", "imitation loss {:.3f}") if _IMITATED in line else "",
        shown(line, "rollout/context/mean", "context {:.0f}"),
        shown(line, "rollout/context/max", "max {:.0f}"),
        shown(line, "rollout/tokens_per_second", "rollout {:,.0f} tokens/s"),
        shown(line, "update/tokens_per_second", "update {:,.0f} tokens/s"),
        f"{total_seconds(line):.1f} s",
    ]
    return ", ".join(part for part in parts if part)


def evaluation_text(line: Line) -> str:
    """An evaluation in one line."""
    parts = [
        _return_text(line),
        *(f"{name} {interval(line, name)} %" for name in outcome_names([line])),
        *_limit_texts(line),
    ]
    told = ", ".join(part for part in parts if part)
    return f"evaluation after {plural(line['iteration'], 'iteration')}: {told}"


def _return_text(line: Line) -> str:
    text = signed(mean_return(line), 3)
    return f"return {text}" if text else ""


def return_text(line: Line) -> str:
    """An evaluation's mean return with half of its 95 % interval, such as `+0.125 ± 0.080`."""
    text = signed(mean_return(line), 3)
    if "return/std" not in line:
        return text
    error = half_interval(line["return/std"], line.get("episodes", 0))
    return text if error is None else f"{text} ± {error:.3f}"


def interval(line: Line, outcome: str) -> str:
    """A share with its 95 % interval in per cent, such as `48 (42-54)`."""
    if f"outcome/{outcome}/share" not in line:
        return ""
    parts = (float(line[f"outcome/{outcome}/{part}"]) for part in ("share", "low", "high"))
    share, low, high = (100 * part for part in parts)
    return f"{share:.0f} ({low:.0f}-{high:.0f})"


def shown(line: Line, name: str, form: str) -> str:
    """A metric in a form such as `context {:.0f}`, or nothing."""
    return form.format(line[name]) if name in line else ""


def total_seconds(line: Line) -> float:
    """Seconds of all stages together; some of them work side by side."""
    return sum(float(value) for name, value in line.items() if name.endswith("/stage_seconds"))
