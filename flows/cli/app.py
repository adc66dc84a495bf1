"""`earl`: its commands together. What they do is imported when they run."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from flows.cli.commands import selector, services, setup, training
from flows.cli.commands.shards import shards

app = typer.Typer(
    help="Train language models by reinforcement learning in games and tools.",
    epilog="Start with: earl doctor, then earl demo or earl train tictactoe_tiny",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (training, services, setup, selector):
    app.add_typer(part.app)
app.add_typer(shards, name="shards")


@app.callback()
def _before_every_command() -> None:
    if not {"-h", "--help"} & set(sys.argv):
        from flows.reaper import settle

        settle(Path("runs"))
