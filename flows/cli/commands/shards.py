"""`earl shards`: the data in shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from earl_core.system.files import user_directory
from flows.cli.arguments import Debug, Run, RunsDirectory
from flows.cli.errors import reported

shards = typer.Typer(
    help="Inspect the data in shared memory, and remove what is left over.", no_args_is_help=True
)


Directory = Annotated[
    Path, typer.Option("--directory", help="Folder in shared memory, as dispatch.directory.")
]
_DEFAULT_DIRECTORY = user_directory()


@shards.command("list")
def shards_list(directory: Directory = _DEFAULT_DIRECTORY, debug: Debug = False) -> None:
    """List what runs hold in shared memory."""
    with reported(debug):
        from flows.cli.shards import list_shards

        list_shards(directory)


@shards.command("show")
def shards_show(
    shard: Annotated[
        str, typer.Argument(help="A shard file, or RUN@ITERATION/STAGE, such as demo@3/rollout.")
    ],
    row: Annotated[int, typer.Option(min=0, help="The row to print.")] = 0,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Print a shard: schema, rows, and one row's columns."""
    with reported(debug):
        from flows.cli.shards import show_shard

        show_shard(shard, row, runs_directory)


@shards.command("sweep")
def shards_sweep(directory: Directory = _DEFAULT_DIRECTORY, debug: Debug = False) -> None:
    """Remove everything in shared memory that no live run owns.

    A stopped run computes again what it loses; nothing of a finished iteration is lost.
    """
    with reported(debug):
        from flows.cli.shards import sweep_shards

        sweep_shards(directory)


@shards.command("serve")
def shards_serve(
    run: Run,
    host: Annotated[
        str, typer.Option(help="The address to listen on. The token travels unencrypted.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8815,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Serve a run's shards, read-only, to any Arrow Flight client that knows the token.

    The token is taken from EARL_SHARDS_TOKEN, or made and written to a file that it names.
    """
    with reported(debug):
        from flows.cli.shards import serve_shards

        serve_shards(run, runs_directory, host, port)
