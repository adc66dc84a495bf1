"""The process of the MLflow server that `earl up` starts; it serves until SIGTERM.

MLflow's own command keeps a second process of the same size beside the server, opens the port
itself, and answers scripts of every site that this machine serves. The application is the one that
it would serve, with passwords (`basic-auth`).
"""

from __future__ import annotations

import configparser
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from earl_core.system.files import private
from earl_core.system.identity import new_identity
from earl_core.system.service import Service
from earl_core.system.web_server import WebServer
from tasks.tracking.database import first_use
from tasks.tracking.served import CERTIFICATE

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

_PASSWORD_SECONDS = 60
"""So long a password that was right is not hashed again; it cannot change meanwhile."""


def environment(
    state: Path, database: Path, ports: Sequence[int], service: Service
) -> dict[str, str]:
    """Variables of the server's process, besides those of this one.

    state: a directory of the services, for its users. database: the SQLite file of the runs. ports:
    for programs and for browsers.
    """
    names = [f"{host}:{port}" for port in ports for host in ("127.0.0.1", "localhost")]
    return {
        # Where MLflow's command tells its server these things.
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{database}",
        "_MLFLOW_SERVER_REGISTRY_STORE": f"sqlite:///{database}",
        # A folder that runs write into themselves, as without a server: what one has begun the
        # other goes on with.
        "_MLFLOW_SERVER_ARTIFACT_ROOT": (database.parent / "mlartifacts").as_uri(),
        "_MLFLOW_SGI_NAME": "uvicorn",
        "MLFLOW_AUTH_CONFIG_PATH": str(state / "mlflow-auth.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": service.user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": service.password,
        CERTIFICATE: service.certificate,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_urlsafe(24),
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(names),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}" for name in names),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }


def _prepare_users() -> None:
    """Users begin anew at each start: one, with the password of the environment."""
    configuration = Path(os.environ["MLFLOW_AUTH_CONFIG_PATH"])
    users = configuration.with_name("mlflow-users.db")
    for leftover in users.parent.glob(f"{users.name}*"):
        leftover.unlink()
    parser = configparser.ConfigParser(interpolation=None)
    parser["mlflow"] = {
        "default_permission": "NO_PERMISSIONS",
        "database_uri": f"sqlite:///{users}",
        "auth_cache_ttl_seconds": str(_PASSWORD_SECONDS),
    }
    with open(configuration, "w", opener=private) as stream:
        parser.write(stream)


def _of_own_pages(app: Application, origins: set[str]) -> Application:
    """Refuse scripts of other sites; MLflow itself would let in all that this machine serves."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        given = {
            value.decode("latin-1") for key, value in scope.get("headers", ()) if key == b"origin"
        }
        if given <= origins:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"The request comes from another site."})

    return guarded


def serve(descriptors: list[int]) -> None:
    """Serve on inherited sockets that listen already: for programs, and for browsers."""
    _prepare_users()
    from mlflow.server.auth import create_app
    from mlflow.server.handlers import initialize_backend_stores

    store = os.environ["_MLFLOW_SERVER_FILE_STORE"]
    with first_use(store):
        initialize_backend_stores(
            store, default_artifact_root=os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"]
        )
    origins = set(os.environ["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"].split(","))
    server = WebServer(
        _of_own_pages(create_app(), origins),
        new_identity(Path(os.environ[CERTIFICATE])),
        *(socket.socket(fileno=descriptor) for descriptor in descriptors),
        log_level="warning",
        timeout_graceful_shutdown=3,
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.start()
    server.join()


if __name__ == "__main__":
    serve([int(each) for each in sys.argv[1].split(",")])
