"""`earl shards`: list, show, sweep and serve what lies in shared memory. pyarrow only."""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from earl_core.config.services import DispatchConfig
from earl_core.dispatch import Manifest, read_manifest
from earl_core.dispatch.shards.manifest import ManifestError
from earl_core.dispatch.shards.shard import open_batch
from earl_core.run.record import config_of_run
from earl_core.run.run_stores import StoreState, list_stores, run_store, sweep
from earl_core.system.errors import ConfigError
from earl_core.system.files import write_atomic
from earl_core.system.plural import plural
from flows.cli.found_runs import find_run
from flows.cli.tables import duration, make_console, rows_table

_VALUES_SHOWN = 256
_LONGEST_PATH = 4096
TOKEN = "EARL_SHARDS_TOKEN"
"""Environment variable: the token to use. A command line would show it to everyone."""
_FILE = "shards.token"


def shards_command(verb: str, directory: Path) -> str:
    """`earl shards VERB` for runs whose dispatch.directory this is."""
    command = f"earl shards {verb}"
    if directory == Path(DispatchConfig().directory):
        return command
    return f"{command} --directory {shlex.quote(str(directory))}"


def list_shards(directory: Path) -> None:
    """A line for every run's folder."""
    console = make_console()
    stores = list(list_stores(directory))
    if not stores:
        console.print(f"Nothing in {directory}.")
        return
    rows = [
        {
            "run": str(store.run_directory or "unknown"),
            "state": _state(store),
            "size": decimal(store.bytes),
            "age": duration(3600 * store.age_hours),
            "folder": str(store.directory),
        }
        for store in stores
    ]
    if not console.is_terminal:
        console.width = 2 * _LONGEST_PATH  # a line for each, whatever their paths
    console.print(rows_table(rows))
    if any(not store.live for store in stores):
        console.print(
            "A stopped run adopts its folder on `earl resume`. "
            f"`{shards_command('sweep', directory)}` removes every folder without a running owner.",
            style="dim",
        )


def _state(store: StoreState) -> str:
    if store.live:
        return "running"
    return "finished or deleted" if store.finished else "stopped"


def sweep_shards(directory: Path) -> None:
    """Remove every folder without a live owner, and say which."""
    removed = sweep(directory)
    for path in removed:
        print(f"removed {path}")
    print(f"{len(removed)} removed from {directory}; folders of running runs are kept.")


def show_shard(shard: str, row: int, runs_directory: str) -> None:
    """Print the shards behind a path or RUN@ITERATION/STAGE."""
    console = make_console()
    if Path(shard).is_file():
        _show_file(Path(shard), row, console)
        return
    manifest, files = _of_manifest(shard, runs_directory)
    _show_manifest(manifest, console)
    if not files:
        console.print("This stage wrote no shards.")
    for path in files:
        if path.is_file():
            _show_file(path, row, console)
        else:
            console.print(
                f"{path} is gone: shards are released once a checkpoint covers their iteration."
            )


def _of_manifest(shard: str, runs_directory: str) -> tuple[Manifest, list[Path]]:
    run, at, rest = shard.partition("@")
    iteration, slash, stage = rest.partition("/")
    if not (at and slash and iteration.isdecimal()):
        raise ConfigError(
            f"{shard!r} is neither a file nor of the form RUN@ITERATION/STAGE, such as "
            "demo@3/rollout"
        )
    path = find_run(run, runs_directory)
    folder = path / "iterations" / f"{int(iteration):06d}"
    sealed = folder / f"{stage}.json"
    if not sealed.is_file():
        known = sorted(file.stem for file in folder.glob("*.json"))
        raise ConfigError(
            f"iteration {iteration} of {path} has no sealed stage {stage!r}: it has "
            f"{', '.join(known) or 'none'}"
        )
    manifest = read_manifest(sealed)
    store = run_store(path, config_of_run(path))
    return manifest, [store.path(entry) for entry in manifest.shards]


def _show_manifest(manifest: Manifest, console: Console) -> None:
    rows = sum(entry.rows for entry in manifest.shards)
    console.print(
        Text.assemble(
            (manifest.stage, "bold"),
            f" of iteration {manifest.iteration}, run {manifest.run}, policy version "
            f"{manifest.policy_version}: {plural(len(manifest.shards), 'shard')}, "
            f"{plural(rows, 'row')}, {decimal(manifest.tensor_bytes)}",
        )
    )


def _show_file(path: Path, row: int, console: Console) -> None:
    try:
        with pa.memory_map(str(path)) as source:
            batch = open_batch(source, str(path))
            _print_batch(path, batch, row, console)
            del batch
    except ManifestError as error:
        raise ConfigError(str(error)) from error


def _print_batch(path: Path, batch: pa.RecordBatch, row: int, console: Console) -> None:
    size = decimal(path.stat().st_size)
    console.print(Text.assemble((f"\n{path}", "bold"), f"  {size}"))
    rows = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        count = len(column.values) if pa.types.is_large_list(field.type) else len(column)
        rows.append({"column": field.name, "type": str(field.type), "values": f"{count:,}"})
    console.print(rows_table(rows))
    for key, value in (batch.schema.metadata or {}).items():
        text = f"{key.decode(errors='replace')}: {value.decode(errors='replace')}"
        console.print(text, style="dim")
    if row >= batch.num_rows:
        raise ConfigError(f"row {row} does not exist: {path} has {plural(batch.num_rows, 'row')}")
    console.print(f"\nRow {row} of {batch.num_rows}:", style="bold")
    for name in batch.schema.names:
        value = batch.column(name)[row].as_py()
        text = _list_text(value) if isinstance(value, list) else str(value)
        console.print(f"  {name:<22}{text}")


def _list_text(values: list[Any]) -> str:
    shown = [
        f"{value:.3g}" if isinstance(value, float) else str(value)
        for value in itertools.islice(values, _VALUES_SHOWN)
    ]
    more = f" … {len(values) - _VALUES_SHOWN} more" if len(values) > _VALUES_SHOWN else ""
    return f"[{len(values)}] {' '.join(shown)}{more}"


def serve_shards(run: str, runs_directory: str, host: str, port: int) -> None:
    """Serve a run's shards to Arrow Flight clients that know the token, until interrupted."""
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
        f"Each call needs the header `authorization: Bearer TOKEN`; the token is in {place}."
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
