"""Notices that the Prefect server in use is gone, so that a run ends instead of waiting for it."""

from __future__ import annotations

import threading
import time

from earl_core.system.errors import EarlError
from flows.server import Server
from flows.server_access import healthy

_EVERY_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""A server that does not answer for so long is taken for lost; a restart is shorter."""


class ServerLost(EarlError):
    """The Prefect server ended, or answers no more."""


class ServerWatch:
    """Asks a server for its health in a thread of its own."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._answered = time.monotonic()
        threading.Thread(target=self._ask, name="server-watch", daemon=True).start()

    def check(self) -> None:
        """Raise `ServerLost` once the server is lost; returns at once."""
        silent = time.monotonic() - self._answered
        if self._server.ended or silent > SILENT_SECONDS:
            how = "has ended" if self._server.ended else f"has not answered for {silent:.0f} s"
            raise ServerLost(
                f"the Prefect server at {self._server.url} {how}: start one with `prefect server "
                "start`, or let the command start its own. Nothing that is finished is lost"
            )

    def _ask(self) -> None:
        while True:
            if healthy(self._server.url, timeout=_EVERY_SECONDS):
                self._answered = time.monotonic()
            time.sleep(_EVERY_SECONDS)
