"""The commands of `earl`: their arguments and help. What they do is imported when they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from earl_core.system.files import user_directory
from flows.cli.errors import reported

app = typer.Typer(
    help="Train language models by reinforcement learning in games and tools.",
    epilog="Start with: earl doctor, then earl demo or earl train tictactoe_tiny",
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
environments = typer.Typer(help="Try environments of your own.", no_args_is_help=True)
app.add_typer(environments, name="env")

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


@app.callback()
def _before_every_command() -> None:
    if not {"-h", "--help"} & set(sys.argv):
        from flows.reaper import settle

        settle(Path("runs"))


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A recipe, such as tictactoe_tiny, or a run file.")],
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
def demo(
    overrides: Overrides = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Train this many in all.")] = None,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Train SmolLM2-135M at tic-tac-toe, in minutes on two CPU cores: the recipe `demo`."""
    with reported(debug):
        from flows.cli.training import demo as run_demo

        given = [f"iterations={iterations}"] if iterations else []
        run_demo([*(overrides or []), *given], plain)


@app.command()
def resume(
    run: Run,
    overrides: Overrides = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="N|initial",
            help="Go back to this iteration's checkpoint first; what came later is set aside.",
        ),
    ] = None,
    runs_directory: RunsDirectory = "runs",
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Continue a run that was stopped or killed; nothing that is finished is repeated.

    If its last checkpoint is damaged, the last whole one is taken.
    """
    with reported(debug):
        from flows.cli.training import resume as run_resume

        run_resume(run, overrides or [], runs_directory, plain, start)


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
        from earl_core.run.record import stored_config
        from flows.cli.playing import play as run_play
        from flows.cli.serving import find_run

        path = find_run(run, runs_directory)
        config = stored_config(path, overrides or [])
        run_play(path, config, checkpoint, me=me, games=games, temperature=temperature, seed=seed)


@app.command()
def serve(
    run: Annotated[
        str, typer.Argument(help="Name of a run, or its directory; or a model directory.")
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, help="On 127.0.0.1.")] = 8001,
    checkpoint: Checkpoint = "last",
    temperature: Temperature = None,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Answer OpenAI's clients with a checkpoint, or with any model, until Ctrl-C."""
    with reported(debug):
        from flows.cli.policy_serve import serve as run_serve

        run_serve((run, runs_directory), checkpoint, overrides or [], port, temperature)


@app.command()
def doctor(
    config: Annotated[str | None, typer.Argument(help="A run file to check as well.")] = None,
    debug: Debug = False,
) -> None:
    """Check this machine: versions, memory, ports, model, offline settings."""
    with reported(debug):
        from flows.cli.doctor import doctor as run_doctor

        raise typer.Exit(run_doctor(config))


@app.command()
def init(
    directory: Annotated[
        Path, typer.Argument(help="New or empty; its name becomes the package's.")
    ],
    debug: Debug = False,
) -> None:
    """Begin a project: an environment, a reward, a run file and a test that runs."""
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
        str | None, typer.Option(metavar="YAML", help="Options of the class: '{limit: 50}'.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Another interpreter that has the class's packages.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=2, help="Played four times each.")] = 18,
    turns: Annotated[int, typer.Option(min=1, help="An episode is given up after these.")] = 100,
    debug: Debug = False,
) -> None:
    """Play an environment with random texts, replay it, and say what breaks training.

    The exit status is 1 if something does. Its code runs in processes of its own.
    """
    with reported(debug):
        from flows.cli.environments import check

        raise typer.Exit(check(target, options, python, episodes, turns))


@app.command()
def profile(
    config: Annotated[str, typer.Argument(help="A recipe, such as tictactoe_tiny, or a run file.")],
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
    with reported(debug):
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
        str, typer.Option("--model", help="A well-known shape, or a directory with a config.json.")
    ] = "qwen2.5-7b",
    hardware: Annotated[
        str, typer.Option("--hardware", help="here, h100-80gb, h200, or such as 16x8xh100-80gb.")
    ] = "here",
    context: Annotated[
        str, typer.Option("--context", help="Tokens of an episode: 32K, or several as 1K,8K,128K.")
    ] = "8K",
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
    debug: Debug = False,
) -> None:
    """Say what a past choice took, or what would be taken, and why. Needs no GPU."""
    with reported(debug):
        from flows.cli import plan as planning

        if memory:
            planning.explain_memory(hardware)
        elif run is not None:
            planning.explain_run(run, runs_directory, explain)
        else:
            load = {"responses": responses, "running": running, "engine_share": engine_share}
            planning.explain_question(
                model, hardware, context, explain, reference=reference, **load
            )


@app.command()
def server(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 4200,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Serve Prefect's web pages and its API, with a password, until Ctrl-C."""
    with reported(debug):
        from flows.cli.serving import serve

        serve(runs_directory, port)


Directory = Annotated[
    Path, typer.Option("--directory", help="The dispatch.directory of the runs' configurations.")
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
        from flows.cli.shards_serve import serve_shards

        serve_shards(run, runs_directory, host, port)
