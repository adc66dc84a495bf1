"""An ASGI application that serves programs over TLS, and people's browsers at a port of their own.

A browser would warn of a certificate that this machine alone knows, so that pages have a plain
loopback port; programs of ours never ask there.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from typing import Any

import uvicorn

_PAUSE_SECONDS = 0.05


class WebServer:
    """Serves in a thread from `start` on, until `stop`.

    identity: of `new_identity`. secure: a socket that listens, for programs. pages: another one,
    for browsers, if there are pages. settings: of `uvicorn.Config`.
    """

    def __init__(
        self,
        application: Any,
        identity: ssl.SSLContext,
        secure: socket.socket,
        pages: socket.socket | None = None,
        **settings: Any,
    ) -> None:
        known = uvicorn.Config(
            application, ssl_context_factory=lambda config, default: identity, **settings
        )
        self._first = uvicorn.Server(known)
        self._sockets = [secure, *([pages] if pages else [])]
        self._servers = [self._first]
        if pages:
            # The first one has started the application by then, and ends it.
            plain = uvicorn.Config(application, **(settings | {"lifespan": "off"}))
            self._servers.append(uvicorn.Server(plain))
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def started(self) -> bool:
        """True when the server answers."""
        return self._first.started

    @property
    def alive(self) -> bool:
        """True while the server serves, or is about to."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Return at once."""
        self._thread.start()

    def stop(self) -> None:
        """Answer what was asked, and end; returns at once."""
        for server in self._servers:
            server.should_exit = True

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end; Python's signal handlers run meanwhile."""
        self._thread.join(seconds)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._first.config.get_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        first = asyncio.create_task(self._first.serve([self._sockets[0]]))
        while not self._first.started and not first.done():
            await asyncio.sleep(_PAUSE_SECONDS)
        others = zip(self._servers[1:], self._sockets[1:], strict=True)
        if not first.done():
            async with asyncio.TaskGroup() as group:
                for server, listener in others:
                    group.create_task(server.serve([listener]))
        await first
