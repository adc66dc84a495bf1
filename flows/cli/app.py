"""The commands of `earl`: their arguments and help. What they do is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.errors import reported

app = typer.Typer(
    help="Train language models by reinforcement learning in games and tools.",
    epilog="Start with: earl doctor, then earl train configs/tictactoe_tiny.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
shards = typer.Typer(
    help="Look at the data in shared memory, and clean it up.", no_args_is_help=True
)
app.add_typer(shards, name="shards")

Run = Annotated[str, typer.Argument(help="Name of a run, or its directory.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change a setting; may be given several times."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="One line per event instead of a live display.")
]
RunsDirectory = Annotated[
    str, typer.Option("--runs-directory", help="Where runs given by name are looked for.")
]
Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="N|last|initial",
        help="The iteration whose checkpoint is used; initial: the model before training.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0.0, help="Sampling temperature; 0: greedy.  As in the run."),
]


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A run file, such as configs/tictactoe_tiny.yaml.")],
    name: Annotated[str | None, typer.Option(help="Name of the run; else the file's.")] = None,
    overrides: Overrides = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Train this many in all.")] = None,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Train a model. A run that exists already is continued."""
    with reported(debug):
        from flows.cli.training import train as run_training

        given = [f"name={name}"] if name else []
        given += [f"iterations={iterations}"] if iterations else []
        run_training(config, [*(overrides or []), *given], plain)


@app.command()
def resume(
    run: Run,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Continue a run that was stopped or killed; nothing that is finished is repeated."""
    with reported(debug):
        from flows.cli.training import resume as run_resume

        run_resume(run, overrides or [], runs_directory, plain)


@app.command()
def evaluate(
    run: Run,
    checkpoint: Checkpoint = "last",
    episodes: Annotated[int | None, typer.Option(min=1, help="Games to play.")] = None,
    temperature: Temperature = None,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Play held-out games with a checkpoint and count the outcomes. The run may be training."""
    with reported(debug):
        from flows.cli.evaluating import evaluate as run_evaluation

        path = (run, runs_directory)
        run_evaluation(path, checkpoint, episodes, temperature, overrides or [], plain)


@app.command()
def play(
    run: Run,
    me: Annotated[bool, typer.Option("--me", help="Play against it yourself.")] = False,
    games: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many; else until Ctrl-C.")
    ] = None,
    checkpoint: Checkpoint = "last",
    temperature: Temperature = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first game; else random.")] = None,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Watch a checkpoint play game after game, or play against it."""
    with reported(debug):
        from flows.cli.playing import PlayRequest
        from flows.cli.playing import play as run_play

        request = PlayRequest(checkpoint, games, temperature, seed, tuple(overrides or ()))
        run_play((run, runs_directory), request, me)


@app.command()
def doctor(
    config: Annotated[str | None, typer.Argument(help="A run file to check as well.")] = None,
    debug: Debug = False,
) -> None:
    """Check this machine: versions, memory, ports, model, offline settings."""
    with reported(debug):
        from flows.cli.doctor import doctor as run_doctor

        raise typer.Exit(run_doctor(config))


Directory = Annotated[
    Path, typer.Option("--directory", help="The dispatch.directory of the runs' configurations.")
]
_DEFAULT_DIRECTORY = Path("/dev/shm/earl")


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
