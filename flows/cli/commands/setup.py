"""Commands around runs: check this machine, create a project, check an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import Debug
from flows.cli.errors import reported

app = typer.Typer()
environments = typer.Typer(help="Check environments of your own.", no_args_is_help=True)
app.add_typer(environments, name="env")


@app.command()
def doctor(
    config: Annotated[str | None, typer.Argument(help="A run file to check as well.")] = None,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Import and try the code that the run file names.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Check this machine: versions, memory, ports, model, offline settings."""
    with reported(debug, runs_code=run_code):
        from flows.cli.doctor import doctor as run_doctor

        raise typer.Exit(run_doctor(config))


@app.command()
def init(
    directory: Annotated[
        Path, typer.Argument(help="A new or empty directory; its name becomes the package's.")
    ],
    debug: Debug = False,
) -> None:
    """Create a project: an environment, a reward, a run file and a test."""
    with reported(debug):
        from flows.cli.project import create_project

        create_project(directory)


@environments.command("check")
def environment_check(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:Class or a built-in name; agent:package.module:function; or a "
            "run file or recipe."
        ),
    ],
    options: Annotated[
        str | None,
        typer.Option(metavar="YAML", help="Options of the environment, such as '{limit: 50}'."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Another Python interpreter, which has the packages.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=2, help="Episodes to play, each four times.")] = 18,
    turns: Annotated[int, typer.Option(min=1, help="Turns after which an episode is ended.")] = 100,
    debug: Debug = False,
) -> None:
    """Play an environment with random texts, replay it, and report what breaks training.

    The exit code is 1 if something does. The environment runs in processes of its own.
    """
    with reported(debug, runs_code=True):
        from flows.cli.environments import check

        raise typer.Exit(check(target, options, python, episodes, turns))
