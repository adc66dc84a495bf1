"""One finding of a check, such as `earl doctor` or `earl env check`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from earl_core.system.errors import EarlError

Level = Literal["good", "note", "warning", "blocks"]


class Finding(NamedTuple):
    """A result of a check. advice: what to do; empty when there is nothing."""

    level: Level
    text: str
    advice: str = ""


def judged(fine: bool, text: str, advice: str, level: Level = "warning") -> Finding:
    """Good where it is fine, else of that level and with advice."""
    return Finding("good", text) if fine else Finding(level, text, advice)


def refused(error: EarlError) -> Finding:
    """A finding that blocks a run with this error."""
    return Finding("blocks", error.problem, error.remedy)
