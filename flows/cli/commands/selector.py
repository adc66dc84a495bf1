"""Commands of the Parallelism Selector: its measurements, its choices."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.arguments import Debug, Json, Overrides, Plain, Recipe, RunsDirectory
from flows.cli.errors import reported

app = typer.Typer()


@app.command()
def profile(
    config: Recipe,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time for all starts of this profile together.")
    ] = 20.0,
    context: Annotated[
        str | None,
        typer.Option(help="Longest context, such as 32K.  The model's position range."),
    ] = None,
    overrides: Overrides = None,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Measure for the selector. Safe to interrupt: rerun to continue. No run is touched."""
    with reported(debug, runs_code=True):
        from flows.cli.profile import profile as run_profile

        run_profile(config, minutes, context, overrides or [], plain)


@app.command()
def plan(
    run: Annotated[
        str | None, typer.Argument(help="A past choice, as RUN@ITERATION, such as demo@12.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every candidate and what speaks against it.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A well-known model, such as qwen3-8b, or a directory with a config.json.  The "
            "largest that fits.",
        ),
    ] = None,
    hardware: Annotated[
        str, typer.Option("--hardware", help="here, h100 (8 of them), 4xh100, 16x8xh100, ...")
    ] = "here",
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="Tokens of an episode: 32K, 1M, or several as 1K,8K,128K.  8K on GPUs, else 1K.",
        ),
    ] = None,
    responses: Annotated[
        int, typer.Option("--responses", min=1, help="Episodes of one iteration.")
    ] = 128,
    running: Annotated[
        int, typer.Option("--running", min=1, help="Most sequences of one engine.")
    ] = 256,
    engine_share: Annotated[
        float, typer.Option("--engine-share", min=0.05, max=1.0, help="Memory an engine may use.")
    ] = 0.85,
    reference: Annotated[
        bool, typer.Option("--reference", help="With a reference model that scores the episodes.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Print the memory formulas for well-known shapes.")
    ] = False,
    runs_directory: RunsDirectory = "runs",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a past choice took, or what would be taken, and why. Needs no GPU.

    Without arguments: for this machine, and a well-known model that fits it.
    """
    with reported(debug):
        from flows.cli import plan as planning

        if memory:
            planning.explain_memory(hardware, as_json)
        elif run is not None:
            planning.explain_run(run, runs_directory, explain, as_json)
        else:
            load = {"responses": responses, "running": running, "engine_share": engine_share}
            planning.explain_question(
                model, hardware, context, explain, as_json, reference=reference, **load
            )
