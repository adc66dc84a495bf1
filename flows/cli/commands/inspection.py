"""Commands that only look: the runs there are, runs side by side, configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import (
    Debug,
    Json,
    Overrides,
    Run,
    RunsDirectory,
    complete_configuration,
    complete_run,
)
from flows.cli.errors import reported

app = typer.Typer()
config = typer.Typer(help="Show and compare configurations.", no_args_is_help=True)
app.add_typer(config, name="config")

_WHAT = "A recipe, a run file, or a run: its name, or its directory where a recipe has the name."
Configuration = Annotated[str, typer.Argument(help=_WHAT, autocompletion=complete_configuration)]


@app.command()
def runs(
    runs_directory: RunsDirectory = "runs", as_json: Json = False, debug: Debug = False
) -> None:
    """List the runs of a directory: state, iterations, last return, size."""
    with reported(debug):
        from flows.cli.runs import list_runs

        list_runs(runs_directory, as_json)


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Two or more runs: their names or directories.",
            autocompletion=complete_run,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page that needs no network, too."),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, help="Equal prompts whose episodes are printed side by side.")
    ] = 1,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Put runs side by side: settings, curves with intervals, seconds by stage, episodes."""
    with reported(debug):
        from flows.cli.comparing import compare_runs

        compare_runs(runs, runs_directory, html, prompts)


@app.command()
def bisect(
    one: Run,
    other: Run,
    runs_directory: RunsDirectory = "runs",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the first stage of two runs whose inputs are equal and whose outputs differ, and why."""
    with reported(debug):
        from flows.cli.bisecting import bisect_runs

        bisect_runs(one, other, runs_directory, as_json)


@config.command("show")
def config_show(
    what: Configuration,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a configuration with all defaults, as YAML. Secrets stay references."""
    with reported(debug):
        from flows.cli.configurations import show

        show(what, runs_directory, overrides or [], as_json)


@config.command("schema")
def config_schema(debug: Debug = False) -> None:
    """Print the JSON schema of run files, for editors and other programs."""
    with reported(debug):
        from flows.cli.configurations import print_schema

        print_schema()


@config.command("diff")
def config_diff(
    one: Configuration,
    other: Configuration,
    runs_directory: RunsDirectory = "runs",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the settings in which two configurations differ."""
    with reported(debug):
        from flows.cli.configurations import diff

        diff(one, other, runs_directory, as_json)
