"""Admission of requests to an engine: a bound on running requests that can change while they
run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Admission:
    """Lets at most so many requests in at a time: by their priority, the lowest number first, and
    those of one in the order in which they came.

    It belongs to one event loop. Without a limit nobody waits.
    """

    def __init__(self) -> None:
        self._limit = sys.maxsize
        self._inside = 0
        self._waiting: dict[str, tuple[int, asyncio.Future[None]]] = {}

    def limit(self, requests: int | None) -> None:
        """The bound from now on; None: there is none. Whoever is in stays in."""
        self._limit = sys.maxsize if requests is None else requests
        self._let_in()

    @asynccontextmanager
    async def entered(self, name: str, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a place, or for `give_up`, and leave at the end of the block."""
        if self._waiting or self._inside >= self._limit:
            turn = asyncio.get_running_loop().create_future()
            self._waiting[name] = priority, turn
            try:
                await turn
            except asyncio.CancelledError:
                self._waiting.pop(name, None)
                if not turn.cancelled():
                    self._leave()  # it was let in at this very moment
                raise
        else:
            self._inside += 1
        try:
            yield
        finally:
            self._leave()

    def give_up(self, name: str) -> None:
        """Let one who waits in at once, because it will ask for nothing any more."""
        _, turn = self._waiting.pop(name, (0, None))
        if turn is not None and not turn.done():
            self._inside += 1
            turn.set_result(None)

    def _leave(self) -> None:
        self._inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._inside < self._limit:
            self.give_up(min(self._waiting, key=lambda name: self._waiting[name][0]))
