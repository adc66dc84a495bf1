"""What a target knows about its rank, and how it talks to the controller during a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class WorkerContext:
    """Handed to the target's constructor.

    `hosts` names the host of each rank, as manifests do; empty: all are on this one. `stage` and
    `iteration` are those of the current call. `cancelled` is set when the caller gave the current
    call up: a method that checks it and returns keeps the group; one that runs on for longer than
    the controller waits costs it.
    """

    rank: int
    world_size: int
    role: str
    log_path: Path
    hosts: tuple[str, ...] = ()
    cancelled: threading.Event = field(default_factory=threading.Event)
    stage: str = ""
    iteration: int | None = None
    _send_progress: Callable[[dict[str, Any]], None] = lambda _: None

    def report(self, progress: dict[str, Any]) -> None:
        """Send a small JSON dictionary to the caller's `on_progress`; a few a second is plenty.

        Any thread may call this. Outside a call, or when the controller is gone, it does nothing.
        Raises `WireError` if the dictionary is not JSON.
        """
        self._send_progress(progress)
