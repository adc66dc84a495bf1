"""The process of a Prefect server that `earl` starts: it serves until its stdin closes."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from earl_core.system.files import FileLock

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

START_SECONDS = 120.0
STOP_SECONDS = 5.0


def _only_api(app: Application) -> Application:
    """Without web pages nothing outside of the API is served: Prefect asks no password there."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/api/"):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return guarded


def serve(descriptor: int) -> None:
    """Serve on an inherited socket that listens already."""
    import uvicorn
    from prefect.server.api.server import create_app

    listener = socket.socket(fileno=descriptor)
    app = create_app() if os.environ.get("PREFECT_UI_ENABLED") == "1" else _only_api(create_app())
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))

    def watch() -> None:
        while os.read(0, 1):
            pass
        server.should_exit = True
        # Requests that hang must not keep it.
        time.sleep(STOP_SECONDS - 1)
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
    # One server at a time creates or migrates the database of a home.
    alone = FileLock(Path(os.environ["PREFECT_HOME"]) / "starting.lock", START_SECONDS)
    thread.start()
    while thread.is_alive() and not server.started:
        thread.join(0.05)
    alone.release()
    thread.join()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
