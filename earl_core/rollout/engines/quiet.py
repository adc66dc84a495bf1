"""Requests of an engine that are held back while something needs the engine without any."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Quiet:
    """All methods are of one event loop."""

    def __init__(self) -> None:
        self._exclusive = asyncio.Lock()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    async def wait(self) -> None:
        """Wait until requests may enter."""
        while not self._open.is_set():
            await self._open.wait()

    def entered(self) -> None:
        """A request runs."""
        self._idle.clear()

    def empty(self) -> None:
        """No request runs."""
        self._idle.set()

    @contextlib.asynccontextmanager
    async def no_requests(self) -> AsyncIterator[None]:
        """Hold back new requests and wait for the running ones."""
        async with self._exclusive:
            self._open.clear()
            try:
                await self._idle.wait()
                yield
            finally:
                self._open.set()
