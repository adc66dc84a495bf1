"""Progress of the stages that go on, for whoever looks at a run from outside: `progress.json`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from earl_core.system.files import read_file, write_atomic

Listener = Callable[[str, int, dict[str, Any]], None]
"""Of a stage, an iteration and an event."""
NAME = "progress.json"
_EVERY_SECONDS = 1.0
_UNITS = ("episodes", "samples")
_MOST = 16
"""Stages that are told of: more do not go on at a time."""


class ToldProgress:
    """Passes events on, and writes down of those that count how much is done.

    The file is lost without harm: one that cannot be written is left out.
    """

    def __init__(self, run: Path, listener: Listener) -> None:
        self._path, self._listener = run / NAME, listener
        self._lock = threading.Lock()
        self._shares: dict[str, float] = {}
        self._written = 0.0

    def __call__(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        """Hear of a stage, in any thread."""
        self._listener(stage, iteration, event)
        unit = next((each for each in _UNITS if event.get(each)), None)
        if unit is None or f"{unit}_done" not in event:
            return
        with self._lock, suppress(OSError):
            key = f"{iteration}: {stage}"
            self._shares.pop(key, None)
            self._shares[key] = round(event[f"{unit}_done"] / event[unit], 3)
            self._shares = dict([*self._shares.items()][-_MOST:])
            if time.monotonic() - self._written >= _EVERY_SECONDS:
                self._write()

    def _write(self) -> None:
        write_atomic(self._path, json.dumps(self._shares).encode())
        self._written = time.monotonic()


def told_share(run: Path, iteration: int, stage: str) -> float | None:
    """How much of a stage was done when it was last told; None where it was not."""
    try:
        shares = json.loads(read_file(run / NAME))
        share = float(shares[f"{iteration}: {stage}"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return min(1.0, max(0.0, share))
