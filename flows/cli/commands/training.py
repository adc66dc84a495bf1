"""Commands on runs: train, resume, evaluate, play, report, serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import (
    Checkpoint,
    Debug,
    Json,
    JsonLines,
    Overrides,
    Plain,
    Quiet,
    Recipe,
    Run,
    RunsDirectory,
    Temperature,
    complete_checkpoint,
    complete_run,
    show,
)
from flows.cli.errors import reported

app = typer.Typer()


@app.command()
def train(
    config: Recipe,
    name: Annotated[
        str | None, typer.Option(help="Name of the run. Default: that of the file.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@N]|MODEL",
            help="Begin a new run with the weights of another one's last checkpoint, or of that of "
            "iteration N (or `best`), or of a model: a directory, or org/name of the hub.",
            autocompletion=complete_run,
        ),
    ] = None,
    overrides: Overrides = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Iterations of the run in all.")
    ] = None,
    plain: Plain = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
    debug: Debug = False,
) -> None:
    """Train a model. A run that exists already is continued."""
    with reported(debug, runs_code=True):
        from flows.cli.training import train as run_training

        given = [f"name={name}"] if name else []
        given += [f"iterations={iterations}"] if iterations else []
        run_training(config, [*(overrides or []), *given], show(plain, quiet, as_json), start)


@app.command()
def demo(
    overrides: Overrides = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Iterations of the run in all.")
    ] = None,
    plain: Plain = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
    debug: Debug = False,
) -> None:
    """Train SmolLM2-135M at tic-tac-toe, in minutes on two CPU cores: the recipe `demo`."""
    with reported(debug, runs_code=True):
        from flows.cli.training import demo as run_demo

        given = [f"iterations={iterations}"] if iterations else []
        run_demo([*(overrides or []), *given], show(plain, quiet, as_json))


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
            autocompletion=complete_checkpoint,
        ),
    ] = None,
    runs_directory: RunsDirectory = "runs",
    plain: Plain = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
    debug: Debug = False,
) -> None:
    """Continue a run that was stopped or killed; nothing that is finished is repeated.

    If its last checkpoint is damaged, the last intact one is used.
    """
    with reported(debug, runs_code=True):
        from flows.cli.training import resume as run_resume

        run_resume(run, overrides or [], runs_directory, show(plain, quiet, as_json), start)


@app.command()
def fork(
    parent: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@N]",
            help="Name of a run, or its directory, and the iteration whose checkpoint the fork "
            "begins with. Default: the last one.",
            autocompletion=complete_run,
        ),
    ],
    name: Annotated[str, typer.Argument(help="Name of the fork.")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be taken over; write nothing.")
    ] = False,
    runs_directory: RunsDirectory = "runs",
    plain: Plain = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
    debug: Debug = False,
) -> None:
    """Train on from a checkpoint of another run, its optimizer's state included.

    What that run has played since, and the settings leave as it was, is not played again.
    """
    with reported(debug, runs_code=True):
        from flows.cli.forking import fork as run_fork

        run_fork(
            (parent, runs_directory), name, overrides or [], show(plain, quiet, as_json), dry_run
        )


@app.command()
def evaluate(
    run: Run,
    checkpoint: Checkpoint = "last",
    episodes: Annotated[int | None, typer.Option(min=1, help="Held-out episodes to play.")] = None,
    temperature: Temperature = None,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    plain: Plain = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
    debug: Debug = False,
) -> None:
    """Play held-out episodes with a checkpoint and count the outcomes. The run may be training."""
    with reported(debug, runs_code=True):
        from flows.cli.evaluating import evaluate as run_evaluation

        path = (run, runs_directory)
        shown = show(plain, quiet, as_json)
        run_evaluation(path, checkpoint, episodes, temperature, overrides or [], shown)


@app.command()
def play(
    run: Run,
    me: Annotated[bool, typer.Option("--me", help="Play against it yourself.")] = False,
    games: Annotated[
        int | None, typer.Option(min=1, help="Number of games. Default: until Ctrl-C.")
    ] = None,
    checkpoint: Checkpoint = "last",
    temperature: Temperature = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of the first game. Default: random.")
    ] = None,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Watch a checkpoint play game after game, or play against it."""
    with reported(debug, runs_code=True):
        from earl_core.run.record import stored_config
        from flows.cli.found_runs import find_run
        from flows.cli.playing import play as run_play

        path = find_run(run, runs_directory)
        config = stored_config(path, overrides or [])
        run_play(path, config, checkpoint, me=me, games=games, temperature=temperature, seed=seed)


@app.command()
def report(
    run: Run,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File to write. Default: report.html in the run."),
    ] = None,
    episodes: Annotated[
        int, typer.Option(min=0, help="Episodes to include at most, the first of each iteration.")
    ] = 10_000,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Write a run as one HTML page that needs no network: curves, plans, failures, episodes."""
    with reported(debug):
        from flows.cli.report import report as write_report

        write_report(run, runs_directory, output, episodes)


@app.command()
def rescore(
    run: Run,
    functions: Annotated[
        list[str],
        typer.Option(
            "--reward",
            metavar="FUNCTION",
            help="As reward.functions names one: package.module:function; or an entry with "
            "options, such as '{function: judge, options: {...}}'. May be given several times.",
        ),
    ],
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Score the episodes that a run has kept by other reward functions; nothing of it changes."""
    with reported(debug, runs_code=True):
        from flows.cli.rescoring import rescore as run_rescoring

        run_rescoring((run, runs_directory), functions, overrides or [], as_json)


@app.command()
def serve(
    run: Annotated[
        str,
        typer.Argument(
            help="Name of a run, or its directory; or a model directory.",
            autocompletion=complete_run,
        ),
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 8001,
    checkpoint: Checkpoint = "last",
    temperature: Temperature = None,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Serve a checkpoint, or any model, over OpenAI's chat completions API until Ctrl-C."""
    with reported(debug, runs_code=True):
        from flows.cli.policy_serve import serve as run_serve

        run_serve((run, runs_directory), checkpoint, overrides or [], port, temperature)


@app.command()
def export(
    run: Run,
    to: Annotated[
        str,
        typer.Option(
            metavar="hf|adapter|episodes",
            help="Format; hf: a Hugging Face directory, of an adapter the whole model that it and "
            "its base make; adapter: its pairs alone, for PEFT; episodes: those that were kept, "
            "without tokens, as .jsonl or .parquet.",
        ),
    ] = "hf",
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="N|last|best|initial",
            help="The iteration whose checkpoint is exported; best: by the run's evaluations.",
        ),
    ] = "last",
    output: Annotated[
        Path | None, typer.Option(help="Directory or file to write. Default: export/ in the run.")
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--redact", help="Rules of what is hidden in episodes: a YAML file."),
    ] = None,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory, or the episodes that a run has kept."""
    with reported(debug):
        from flows.cli.exporting import export as run_export

        run_export(run, runs_directory, to, checkpoint, output, rules)


@app.command(name="debug")
def debug_run(
    run: Annotated[
        str, typer.Argument(metavar="RUN_OR_CONFIG", help="A run, a recipe or a run file.")
    ],
    stage: Annotated[
        str | None,
        typer.Option(help="Repeat this stage of a run from its sealed inputs; it is only read."),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option(min=0, help="Iteration of the run. Default: the last, or the next."),
    ] = None,
    iterations: Annotated[
        int, typer.Option(min=1, help="Number of iterations, without --stage.")
    ] = 1,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each iteration, without --stage. Default: 2."),
    ] = None,
    overrides: Overrides = None,
    runs_directory: RunsDirectory = "runs",
    debug: Debug = False,
) -> None:
    """Run an iteration in one process, where breakpoint() works; its results are not kept."""
    with reported(debug, runs_code=True):
        from flows.cli.debugging import debug as run_debug

        run_debug(run, stage, iteration, iterations, prompts, overrides or [], runs_directory)
