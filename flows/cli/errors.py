"""The end of a command: the curve and where to look, or one readable error with a remedy."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import typer
from rich.console import Console

from earl_core.cluster.errors import WorkerCallFailed, WorkerError
from earl_core.config import RunConfig
from earl_core.run.record import read_record
from earl_core.system.errors import EarlError
from earl_core.system.import_path import looking
from earl_core.system.storage_errors import full_disks, remedy_of
from flows.cli.curve import Series, draw
from flows.cli.found_runs import evaluations_of, iterations_of, tracking_uri
from flows.cli.shards import shards_command
from flows.cli.tables import evaluation_table, iteration_table
from flows.cli.terminal import readable
from flows.server import Server
from tasks.reports.lines import Line, mean_return, outcome_names, outcome_shares, signed
from tasks.tracking.run_note import mlflow_page

_TAIL_LINES = 12
_LOG_PREFIX = "  | "
_FRAMES = re.compile(
    rf"^({re.escape(_LOG_PREFIX)}|)(.*?)[ ]*Traceback \(most recent call last\):\n"
    r"(?:\1[ \t].*(?:\n|\Z))*",
    re.MULTILINE,
)
_DEBUG_HINT = "Run the command again with --debug for the traceback."


@contextmanager
def reported(debug: bool, runs_code: bool = False) -> Iterator[None]:
    """Turn an exception into a block on stderr and an exit code: 2 for wrong input, else 1.
    runs_code: whether the command may import what a run file names; the others only look."""
    try:
        with nullcontext() if runs_code else looking():
            yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # `earl … | head`: the reader has enough. Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except Exception as error:
        # Python 3.11 turns one that falls into the making of a class into a RuntimeError.
        if isinstance(error.__cause__, KeyboardInterrupt):
            print("Stopped.", file=sys.stderr)
            raise typer.Exit(130) from None
        if debug:
            traceback.print_exception(error)
            if isinstance(error, WorkerCallFailed):
                print(f"In the worker:\n{error.raised.traceback}", file=sys.stderr)
        print(readable(describe(error)), file=sys.stderr)
        raise typer.Exit(exit_code(error)) from None


def exit_code(error: BaseException) -> int:
    """2 when the input was wrong, 1 otherwise."""
    return error.exit_code if isinstance(error, EarlError) else 1


def describe(error: BaseException) -> str:
    """The block: what happened and what to do, without a traceback. Notes of the error follow."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    block = "\n".join(_block(error))
    cut = without_frames(block)
    if cut != block and _DEBUG_HINT not in cut:
        cut = f"{cut.rstrip()}\n{_DEBUG_HINT}"
    return "\n".join([cut, *notes])


def without_frames(text: str) -> str:
    """Cut tracebacks out of a message (those of environments come in one); their errors stay."""
    return _FRAMES.sub(lambda m: f"{m[1]}{m[2]}\n" if m[2].strip() else "", text)


def _block(error: BaseException) -> list[str]:
    if isinstance(error, WorkerCallFailed):
        if error.expected:
            return [f"error: {error.raised.message}"]
        where = error.where
        log = [f"The worker's log is {where.log_path}."] if where.log_path else []
        place = f"It happened in {where.sentence()}."
        return [f"error: {error.reason}", place, *log, _DEBUG_HINT]
    if isinstance(error, WorkerError):
        return [f"error: {_shorten(str(error))}"]
    if isinstance(error, EarlError) and error.expected:
        return [f"error: {error}"]
    remedy = [f"What to do: {what}." for what in [remedy_of(error)] if what]
    if isinstance(error, OSError) and error.filename:
        return [f"error: {error.strerror}: {error.filename}", *remedy, _DEBUG_HINT]
    # The text of an OSError made of (number, sentence) begins with the number.
    sentence = (isinstance(error, OSError) and error.strerror) or str(error)
    named = ": ".join(part for part in (type(error).__name__, sentence) if part)
    # Prefect's server, and libraries, say no more than that something failed.
    databases = (os.environ.get("PREFECT_HOME", "."), tempfile.gettempdir())
    full = [
        f"The file system of {place} is full: free space there, and resume the run."
        for place in full_disks(map(Path, databases))
    ]
    return [f"error: {named}", *remedy, *full, _DEBUG_HINT]


def _shorten(text: str) -> str:
    lines = text.splitlines()
    head = [line for line in lines if not line.startswith(_LOG_PREFIX)]
    tail = [line for line in lines if line.startswith(_LOG_PREFIX)]
    return "\n".join([*head, *tail[-_TAIL_LINES:]])


_EDGE_ROWS = 2


def print_ending(run: Path, settings: RunConfig, used: Server, console: Console) -> None:
    """The whole ending of a finished run."""
    text = learning_curve(run)
    if text:
        console.print(f"\nLearning curve of {run.name}", style="bold")
        console.print(text)
    evaluations = evaluations_of(run)
    if evaluations:
        console.print()
        console.print(evaluation_table(evaluations))
    else:
        console.print(iteration_table(_edges(iterations_of(run))))
    for heading, lines in (
        ("Where to look", places(run, used)),
        ("What to try next", next_commands(run, settings)),
    ):
        console.print(f"\n{heading}", style="bold")
        for what, command in lines:
            console.print(f"  {what:<36} {command}", soft_wrap=True)


def learning_curve(run: Path) -> str:
    """Held-out shares when the run was evaluated at least twice, and the training's returns."""
    lines, evaluations = iterations_of(run), evaluations_of(run)
    charts = []
    if len(evaluations) > 1:
        names = outcome_names(evaluations)
        best = [name for name in names if name in ("win", "illegal")] or names[:2]
        series = [Series("win (training)", "·", _curve(lines, _share("win"), 1))]
        series += [
            Series(f"{name} (held-out)", mark, _curve(evaluations, _share(name)))
            for name, mark in zip(best, "●x", strict=False)
        ]
        charts.append(draw(series, y_text="{:.0%}".format, y_range=(0.0, 0.0)))
    returns = _curve(lines, mean_return, 1)
    if len(returns) > 1:
        series = [Series("return (training)", "·", returns)]
        series.append(Series("return (held-out)", "●", _curve(evaluations, mean_return)))
        charts.append(draw(series, y_text=lambda value: signed(value, 2)))
    return "\n\n".join(chart for chart in charts if chart)


def _share(outcome: str) -> Callable[[Line], float | None]:
    def share(line: Line) -> float | None:
        shares = outcome_shares(line)
        return shares.get(outcome, 0.0) if shares else None

    return share


def _curve(
    lines: Sequence[Line], number: Callable[[Line], float | None], later: int = 0
) -> tuple[tuple[float, float], ...]:
    """The number of each line that has it, over how many iterations were done by then."""
    found = ((float(line["iteration"] + later), number(line)) for line in lines)
    return tuple((done, value) for done, value in found if value is not None)


def places(run: Path, used: Server) -> list[tuple[str, str]]:
    """(what, command or address) for the run directory, MLflow and Prefect."""
    found = [("everything about the run", f"{run}/ (config.yaml, metrics.jsonl, logs/)")]
    elsewhere = f" --runs-directory {shlex.quote(str(run.parent))}"
    up = "earl up" + ("" if run.parent == Path("runs") else elsewhere)
    uri = tracking_uri(run)
    if uri is not None:
        command = f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        if uri == f"sqlite:///{run.parent.resolve() / 'mlflow.db'}":
            command = up
        served = uri.startswith(("http://", "https://"))
        page = mlflow_page(read_record(run)) or uri
        found.append(("metrics, plans, episodes in MLflow", page if served else command))
    pages = up if used.embedded else used.access.site
    found.append(("flow runs and stages in Prefect", pages))
    return found


def next_commands(run: Path, settings: RunConfig) -> list[tuple[str, str]]:
    """(what, command) to go on with."""
    name = shell_name(run)
    return [
        ("watch it play", f"earl play {name}"),
        ("play against it", f"earl play {name} --me"),
        ("measure it", f"earl evaluate {name} --episodes 512"),
        ("train it for longer", f"earl resume {name} --set iterations={2 * settings.iterations}"),
        ("see what is in shared memory", shards_command("list", Path(settings.dispatch.directory))),
    ]


def shell_name(run: Path) -> str:
    """Name the run for a command: by its name where commands look for names."""
    return shlex.quote(run.name if run.parent == Path("runs") else str(run))


def _edges(rows: list[Line]) -> list[Line]:
    return rows if len(rows) <= 2 * _EDGE_ROWS else rows[:_EDGE_ROWS] + rows[-_EDGE_ROWS:]
