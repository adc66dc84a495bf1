"""The process of a Prefect server that `earl` starts.

One of a command's own serves until its stdin closes. One of `earl up` has the web pages, serves
until SIGTERM, and keeps the states of the flow runs of a runs directory true.
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
from flows.reaper import keep_reconciled
from flows.server_access import START_SECONDS, STOP_SECONDS, Access

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""


def _only_api(app: Application) -> Application:
    """Without web pages nothing outside of the API is served: Prefect asks no password there."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/api/"):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return guarded


def serve(descriptor: int, runs_directory: str | None = None) -> None:
    """Serve on an inherited socket that listens already.

    runs_directory: that of a server that `earl up` starts; None for a command's own.
    """
    import uvicorn
    from prefect.server.api.server import create_app

    listener = socket.socket(fileno=descriptor)
    app = create_app() if runs_directory is not None else _only_api(create_app())
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))

    ending = threading.Event()

    def end() -> None:
        ending.wait()
        server.should_exit = True
        # Requests that hang must not keep it.
        time.sleep(STOP_SECONDS - 1)
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
    thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
    # One server at a time creates or migrates the database of a home.
    alone = FileLock(Path(os.environ["PREFECT_HOME"]) / "starting.lock", START_SECONDS)
    thread.start()
    while thread.is_alive() and not server.started:
        thread.join(0.05)
    alone.release()
    if runs_directory is not None:
        access = Access(os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"])
        keep_reconciled(access, runs_directory)
    thread.join()


if __name__ == "__main__":
    serve(int(sys.argv[-1]), *sys.argv[1:-1])
