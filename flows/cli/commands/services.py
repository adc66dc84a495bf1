"""Commands on the services of a runs directory: up, down, status."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.arguments import Debug, Json, RunsDirectory
from flows.cli.errors import reported

app = typer.Typer()


@app.command()
def up(
    runs_directory: RunsDirectory = "runs",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of Prefect. Default: 4200, or the last one."),
    ] = None,
    mlflow_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of MLflow. Default: 5000, or the last one."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Start Prefect, MLflow and a worker, and deploy all flows. Running services are kept."""
    with reported(debug, runs_code=True):
        from flows.cli.services import up as start

        start(runs_directory, port, mlflow_port)


@app.command()
def down(runs_directory: RunsDirectory = "runs", debug: Debug = False) -> None:
    """Stop what `earl up` started. Flow runs are cancelled, and can be resumed."""
    with reported(debug):
        from flows.cli.services import down as end

        end(runs_directory)


@app.command()
def status(
    runs_directory: RunsDirectory = "runs", as_json: Json = False, debug: Debug = False
) -> None:
    """Show servers, worker, runs with iteration and stage, and shared memory."""
    with reported(debug):
        from flows.cli.status import show_status

        show_status(runs_directory, as_json)
