"""`earl shards serve`: a run's shards for any Arrow Flight client that knows the token."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from earl_core.run.record import config_of_run
from earl_core.run.run_stores import run_store
from earl_core.system.errors import ConfigError
from earl_core.system.files import write_atomic
from flows.cli.found_runs import find_run
from flows.cli.tables import make_console

TOKEN = "EARL_SHARDS_TOKEN"
"""Environment variable: the token to use. A command line would show it to everyone."""

_FILE = "shards.token"


def serve_shards(run: str, runs_directory: str, host: str, port: int) -> None:
    """Serve until interrupted."""
    # gRPC would print lines of its own before the one sentence that says what to do.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import pyarrow as pa

    from earl_core.dispatch.remote.flight import ShardFlightServer

    path = find_run(run, runs_directory)
    store = run_store(path, config_of_run(path))
    token, place = choose_token(path)
    try:
        server = ShardFlightServer(store.directory, token, host, port)
    except ValueError as error:
        raise ConfigError(f"{error}, in {TOKEN}, or unset it to have one made") from error
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"port {port} of {host} cannot be listened on; another program may use it, or the "
            "address is not of this machine: choose another --port (0: any free one) or --host"
        ) from error
    console = make_console()
    console.print(f"Serving the shards of {path} at {server.address}, read-only.")
    console.print(
        f"Each call needs the header `authorization: Bearer TOKEN`; the token is in {place}.",
    )
    console.print(
        f'pyarrow.flight.connect("{server.address}").list_flights(options=...) lists them; '
        "Ctrl-C ends.",
        style="dim",
    )
    with server:
        server.serve()


def choose_token(run: Path) -> tuple[str, str]:
    """The token of the environment, else a new one in a file of the run; and where it stands."""
    given = os.environ.get(TOKEN)
    if given is not None:
        return given.strip(), TOKEN
    token = secrets.token_urlsafe(32)
    write_atomic(run / _FILE, token.encode())
    return token, str(run / _FILE)
