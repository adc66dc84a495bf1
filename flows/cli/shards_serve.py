"""`earl shards serve`: a run's shards for any Arrow Flight client."""

from __future__ import annotations

import os
from pathlib import Path

from earl_core.config import load_config
from earl_core.run.shards import run_store
from flows.cli.errors import UsageProblem
from flows.cli.runs import find_run
from flows.cli.tables import make_console


def serve_shards(run: str, runs_directory: str, host: str, port: int, token: Path | None) -> None:
    """Serve until interrupted."""
    # gRPC would print lines of its own before the one sentence that says what to do.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import pyarrow as pa

    from earl_core.dispatch.flight import ShardFlightServer

    path = find_run(run, runs_directory)
    store = run_store(path, load_config(path / "config.yaml"))
    try:
        server = ShardFlightServer(store.directory, read_token(token), host, port)
    except ValueError as error:
        raise UsageProblem(f"{error}: name a file that holds a token with --token-file") from error
    except (OSError, pa.ArrowException) as error:
        raise UsageProblem(
            f"port {port} of {host} cannot be listened on; another program may use it, or the "
            "address is not of this machine: choose another --port (0: any free one) or --host"
        ) from error
    console = make_console()
    console.print(f"Serving the shards of {path} at {server.address}, read-only.")
    console.print(
        f'pyarrow.flight.connect("{server.address}").list_flights() lists them; Ctrl-C ends.',
        style="dim",
    )
    with server:
        server.serve()


def read_token(path: Path | None) -> str | None:
    """The token in a file, without surrounding space. Raises `UsageProblem`."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"the token file {path} cannot be read: {error}") from error
    if not token:
        raise UsageProblem(f"the token file {path} is empty: write a long random word into it")
    return token
