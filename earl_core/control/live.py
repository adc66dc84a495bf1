"""Live objects of this process: runs, players of policies, profiles. Whoever handles a signal finds
it here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Live(Protocol):
    """Something with workers."""

    def interrupt(self) -> None:
        """End the workers now, from any thread, again and again; calls under way raise."""
        ...


_live: dict[str, Live] = {}


@contextmanager
def live(name: str, thing: Live) -> Iterator[None]:
    """Have it found, by its name or by whoever handles a signal, until the block ends."""
    _live[name] = thing
    try:
        yield
    finally:
        _live.pop(name, None)


def find(name: str) -> Live | None:
    """Return the live object that this process has open under a name; None without one."""
    return _live.get(name)


def interrupt_all() -> None:
    """Stop everything, for whoever handles a signal."""
    for thing in list(_live.values()):
        thing.interrupt()
