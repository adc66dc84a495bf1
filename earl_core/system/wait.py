"""How long what comes later is waited for. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

LATER = "later"
"""Name of the reward function whose scores come later."""

WAITING = ("deadline_seconds", "poll_seconds", "timeout_seconds")
"""Its options that say how scores are waited for."""

DEADLINE_SECONDS = 1800.0
POLL_SECONDS = 10.0


class Wait(NamedTuple):
    """How long a score is waited for, and how long between two looks, in seconds."""

    deadline: float
    poll: float

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Wait:
        """Take it out of the options. Raises `ValueError`."""
        wait = cls(
            options.get("deadline_seconds", DEADLINE_SECONDS),
            options.get("poll_seconds", POLL_SECONDS),
        )
        for name, value in wait._asdict().items():
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise ValueError(f"{name}_seconds is {value!r}: give a number of seconds above 0")
        return wait
