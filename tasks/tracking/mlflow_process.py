"""The process of the MLflow server that `earl up` starts; it serves until SIGTERM.

MLflow's own command keeps a second process of the same size beside the server, opens the port
itself, and answers scripts of every site that this machine serves. The application is the one that
it would serve, with passwords (`basic-auth`).
"""

from __future__ import annotations

import configparser
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from earl_core.system.files import private
from tasks.tracking.mlflow_client import first_use

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

_PASSWORD_SECONDS = 60
"""So long a password that was right is not hashed again; it cannot change meanwhile."""


def environment(state: Path, database: Path, port: int, user: str, password: str) -> dict[str, str]:
    """Variables of the server's process, besides those of this one.

    state: a directory of the services, for its users. database: the SQLite file of the runs.
    """
    names = f"127.0.0.1:{port}", f"localhost:{port}"
    return {
        # Where MLflow's command tells its server these things.
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{database}",
        "_MLFLOW_SERVER_REGISTRY_STORE": f"sqlite:///{database}",
        # A folder that runs write into themselves, as without a server: what one has begun the
        # other goes on with.
        "_MLFLOW_SERVER_ARTIFACT_ROOT": (database.parent / "mlartifacts").as_uri(),
        "_MLFLOW_SGI_NAME": "uvicorn",
        "MLFLOW_AUTH_CONFIG_PATH": str(state / "mlflow-auth.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
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


def serve(descriptor: int) -> None:
    """Serve on an inherited socket that listens already."""
    _prepare_users()
    import uvicorn
    from mlflow.server.auth import create_app
    from mlflow.server.handlers import initialize_backend_stores

    store = os.environ["_MLFLOW_SERVER_FILE_STORE"]
    with first_use(store):
        initialize_backend_stores(
            store, default_artifact_root=os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"]
        )
    origins = set(os.environ["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"].split(","))
    app = _of_own_pages(create_app(), origins)
    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
    uvicorn.Server(settings).run([socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    serve(int(sys.argv[1]))
