"""The listener that agents elsewhere reach: one for all gateways of a process, at one port.

A gateway has the sessions of the episodes that it plays; the name of a session, in the path of a
request, says whose it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import uvicorn

from earl_core.config.gateway import filled
from earl_core.rollout.public_address import PublicAddress
from earl_core.system.certificates import serving
from earl_core.system.listening import listen_within

_IDLE_SECONDS = 3600
"""A connection is kept: an agent may be long with a tool, and its client need not ask again when a
request meets the end of its connection."""

Holds = Callable[[str], bool]
"""Tells whether a gateway has the session of a name."""


class Front:
    """Serves while gateways have joined. All of one event loop."""

    _open: ClassVar[dict[PublicAddress, Front]] = {}
    _sockets: ClassVar[dict[PublicAddress, socket.socket]] = {}
    """They stay, so that no other takes the port, and agents that go on after a rollout ask
    nobody else."""

    def __init__(self, address: PublicAddress) -> None:
        self._address = address
        self._joined: list[tuple[Any, Holds]] = []
        if address not in self._sockets:
            self._sockets[address] = listen_within(address.host, address.ports)
        listener = self._sockets[address]
        self.url = filled(address.url, listener.getsockname()[1])
        """The URL, with its port."""
        self._server = Server(server_config(self._answer, address))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener.dup()]))

    @classmethod
    def join(cls, address: PublicAddress, application: Any, holds: Holds) -> Front:
        """Have the front answer requests of a gateway's sessions. Raises `ConfigError`."""
        front = cls._open.get(address)
        if front is None or front._serving.done():
            front = cls._open[address] = cls(address)
        front._joined.append((application, holds))
        return front

    async def leave(self, application: Any) -> None:
        """Answer no more for it; the last one that leaves ends the front."""
        self._joined = [each for each in self._joined if each[0] is not application]
        if not self._joined:
            if self._open.get(self._address) is self:
                del self._open[self._address]
            self._server.should_exit = True
            await asyncio.wait({self._serving})

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        name = scope["path"].lstrip("/").partition("/")[0]
        holding = [application for application, holds in self._joined if holds(name)]
        # One that does not hold it refuses it.
        application = holding[0] if holding else self._joined[0][0]
        await application(scope, receive, send)


class Server(uvicorn.Server):
    """A server in a process whose signals are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def server_config(application: Any, address: PublicAddress | None = None) -> uvicorn.Config:
    """Return the settings of a gateway's server. address: where it listens with TLS."""
    named: dict[str, Any] = {}
    if address and address.certificate and address.key:
        context = serving(address.certificate, address.key)
        named["ssl_context_factory"] = lambda config, default: context
    return uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        interface="asgi3",
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=_IDLE_SECONDS,
        **named,
    )
