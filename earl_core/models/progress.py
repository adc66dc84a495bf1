"""Reports of the progress of long work, such as making a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[dict[str, Any]], None]
"""Gets `UNIT_done` and `UNIT`, which is `steps` or `MB`."""


def quiet(done: dict[str, Any]) -> None:
    """Report to nobody."""


@contextmanager
def ticking(tell: Callable[[], None], seconds: float = 1.0) -> Iterator[None]:
    """Call `tell` every so often from a thread, until the block ends."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(seconds):
            tell()

    thread = threading.Thread(target=tick, name="earl-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
