"""`earl shards serve`: a run's shards for any Arrow Flight client."""

from __future__ import annotations

from pathlib import Path

from earl_core.config import load_config
from earl_core.run.shards import run_store
from flows.cli.errors import UsageProblem
from flows.cli.runs import find_run
from flows.cli.tables import make_console


def serve_shards(run: str, runs_directory: str, host: str, port: int, token: Path | None) -> None:
    """Serve until interrupted."""
    from earl_core.dispatch.flight import ShardFlightServer

    path = find_run(run, runs_directory)
    store = run_store(path, load_config(path / "config.yaml"))
    try:
        server = ShardFlightServer(store.directory, read_token(token), host, port)
    except ValueError as error:
        raise UsageProblem(f"{error}: name a file that holds a token with --token-file") from error
    except OSError as error:
        raise UsageProblem(f"{host}:{port} cannot be listened on: {error}") from error
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
