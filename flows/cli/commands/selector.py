"""Commands of the Parallelism Selector: measurements and plans."""

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
        float, typer.Option(min=0.1, help="Time limit of all starts of this profile together.")
    ] = 20.0,
    context: Annotated[
        str | None, typer.Option(help="Longest context, such as 32K. Default: that of the model.")
    ] = None,
    overrides: Overrides = None,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Measure stage deployments for the Parallelism Selector; after Ctrl-C, repeat to continue."""
    with reported(debug, runs_code=True):
        from flows.cli.profile import profile as run_profile

        run_profile(config, minutes, context, overrides or [], plain)


PlannedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A well-known model, such as qwen3-8b, or a directory with a config.json. "
        "Default: the largest that fits.",
    ),
]
PlannedHardware = Annotated[
    str,
    typer.Option("--hardware", help="here (this machine), h100 (8 GPUs), 4xh100, 16x8xh100, ..."),
]
PlannedStaleness = Annotated[
    int,
    typer.Option(
        "--staleness", min=0, max=7, help="Versions that a rollout's may be older: overlap."
    ),
]
PlannedContext = Annotated[
    str | None,
    typer.Option(
        "--context",
        help="Tokens of an episode: 32K, 1M, or several as 1K,8K,128K. Default: 8K on GPUs, "
        "else 1K.",
    ),
]

PlannedAdapter = Annotated[
    int | None,
    typer.Option(
        "--adapter",
        min=1,
        max=512,
        help="Rank of a low-rank adapter that is trained in place of the model, such as 16.",
    ),
]
PlannedRun = Annotated[
    str | None,
    typer.Argument(
        help="A past plan, as RUN@ITERATION, such as demo@12; or a run file, recipe or run."
    ),
]

Explained = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Show all candidates, and why each was not chosen; of a run file who is where, "
        "and what moves between the stages.",
    ),
]

MemoryFormulas = Annotated[
    bool, typer.Option("--memory", help="Print the memory formulas for well-known models.")
]

CodeRuns = Annotated[
    bool, typer.Option("--run-code", help="Import the code that the run file names.")
]


@app.command()
def plan(
    command: typer.Context,
    run: PlannedRun = None,
    explain: Explained = False,
    model: PlannedModel = None,
    hardware: PlannedHardware = "here",
    context: PlannedContext = None,
    responses: Annotated[
        int, typer.Option("--responses", min=1, help="Episodes of an iteration.")
    ] = 128,
    running: Annotated[
        int,
        typer.Option("--running", min=1, help="Sequences that an engine decodes at the same time."),
    ] = 256,
    engine_share: Annotated[
        float,
        typer.Option(
            "--engine-share", min=0.05, max=1.0, help="Share of the memory that an engine may use."
        ),
    ] = 0.85,
    reference: Annotated[
        bool, typer.Option("--reference", help="Plan a reference model (KL penalty), too.")
    ] = False,
    staleness: PlannedStaleness = 0,
    adapter: PlannedAdapter = None,
    memory: MemoryFormulas = False,
    overrides: Overrides = None,
    run_code: CodeRuns = False,
    runs_directory: RunsDirectory = "runs",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain a past plan or that of a run file, or predict one for given hardware and model. Needs
    no GPU.

    Without arguments: a prediction for this machine and a well-known model that fits it.
    """
    with reported(debug, runs_code=run_code):
        from flows.cli import plan as planning
        from flows.cli.plan_arguments import refuse_unread

        refuse_unread(command, run, memory)
        if memory:
            planning.explain_memory(hardware, as_json)
        elif run is not None and "@" not in run:
            from flows.cli.plan_file import explain_file

            given = run, runs_directory, overrides or [], hardware
            explain_file(*given, explain, as_json, model, context)
        elif run is not None:
            from flows.cli.past_plan import explain_run

            explain_run(run, runs_directory, explain, as_json)
        else:
            load = {"responses": responses, "running": running, "engine_share": engine_share}
            asked = {**load, "reference": reference, "staleness": staleness}
            planning.explain_question(model, hardware, context, explain, as_json, adapter, **asked)
