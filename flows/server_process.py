"""The process of a Prefect server that `earl` starts.

One of a command's own serves until its stdin closes. One of `earl up` has the web pages, serves
until SIGTERM, and keeps the states of the flow runs of a runs directory true. Both write the
certificate that PREFECT_API_SSL_CERT_FILE names, anew.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from earl_core.system.files import FileLock
from earl_core.system.identity import new_identity
from earl_core.system.web_server import WebServer
from flows.reaper import keep_reconciled
from flows.server_access import START_SECONDS, STOP_SECONDS, Access

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""


def _only_api(app: Application) -> Application:
    """Serve the API alone, for a server without web pages: Prefect asks no password there."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/api/"):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return guarded


def serve(descriptors: list[int], runs_directory: str | None = None) -> None:
    """Serve on inherited sockets that listen: for programs, and for browsers if there are pages.
    runs_directory: that of a server that `earl up` starts; None for a command's own."""
    ending, serving = threading.Event(), list[WebServer]()

    def end() -> None:
        ending.wait()
        for server in serving:
            server.stop()
            # Requests that hang must not keep it.
            time.sleep(STOP_SECONDS - 1)
        # Before it serves it does nothing but import.
        os._exit(0)

    def watch() -> None:
        while os.read(0, 1):
            pass
        ending.set()

    threading.Thread(target=end, name="end", daemon=True).start()
    if runs_directory is None:
        threading.Thread(target=watch, name="lifeline", daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, lambda *_: ending.set())

    from prefect.server.api.server import create_app

    from flows.server_database import wait_for_writers

    wait_for_writers()
    certificate = os.environ["PREFECT_API_SSL_CERT_FILE"]
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    app = create_app() if runs_directory is not None else _only_api(create_app())
    identity = new_identity(Path(certificate))
    server = WebServer(app, identity, *listeners, log_level="error", lifespan="on")
    # One server at a time creates or migrates the database of a home.
    alone = FileLock(Path(os.environ["PREFECT_HOME"]) / "starting.lock", START_SECONDS)
    serving.append(server)
    server.start()
    while server.alive and not server.started:
        server.join(0.05)
    alone.release()
    if runs_directory is not None:
        url, auth = os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"]
        keep_reconciled(Access(url, auth, certificate), runs_directory)
    server.join()


if __name__ == "__main__":
    _numbers = [int(each) for each in sys.argv[1].split(",")]
    serve(_numbers, *sys.argv[2:])
