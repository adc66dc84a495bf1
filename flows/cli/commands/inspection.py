"""Commands that only look: the runs there are, configurations."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.arguments import Debug, Json, Overrides, RunsDirectory, complete_configuration
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
