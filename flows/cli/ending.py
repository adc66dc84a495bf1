"""What `earl train` prints when a run is over: the curve, where to look, what to try."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from earl_core.config import RunConfig
from flows.cli.curve import Series, draw
from flows.cli.results import (
    Line,
    evaluation_table,
    iteration_table,
    mean_return,
    outcome_names,
    outcome_shares,
)
from flows.cli.runs import evaluations_of, iterations_of, tracking_uri
from flows.cli.shards import shards_command
from flows.cli.tables import signed
from flows.server import Server

_EDGE_ROWS = 2


def print_ending(run: Path, settings: RunConfig, used: Server, console: Console) -> None:
    """The whole ending of a finished run."""
    text = learning_curve(run)
    if text:
        console.print(f"\n[bold]Learning curve of {run.name}[/bold]")
        console.print(text, highlight=False, markup=False)
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
        console.print(f"\n[bold]{heading}[/bold]")
        for what, command in lines:
            console.print(f"  {what:<36} {command}", highlight=False, markup=False, soft_wrap=True)


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
    return lambda line: outcome_shares(line).get(outcome)


def _curve(
    lines: Sequence[Line], number: Callable[[Line], float | None], later: int = 0
) -> tuple[tuple[float, float], ...]:
    """The number of each line that has it, over how many iterations were done by then."""
    found = ((float(line["iteration"] + later), number(line)) for line in lines)
    return tuple((done, value) for done, value in found if value is not None)


def places(run: Path, used: Server) -> list[tuple[str, str]]:
    """(what, command or address) for the run directory, MLflow and Prefect."""
    found = [("everything about the run", f"{run}/ (config.yaml, metrics.jsonl, logs/)")]
    uri = tracking_uri(run)
    if uri is not None:
        served = uri.startswith(("http://", "https://"))
        command = f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        found.append(("metrics, plans, episodes in MLflow", uri if served else command))
    pages = used.url.removesuffix("/api")
    if used.embedded:
        elsewhere = f" --runs-directory {shlex.quote(str(run.parent))}"
        pages = "earl server" + ("" if run.parent == Path("runs") else elsewhere)
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
    """How to name the run in a command: by its name where commands look for names."""
    return shlex.quote(run.name if run.parent == Path("runs") else str(run))


def _edges(rows: list[Line]) -> list[Line]:
    return rows if len(rows) <= 2 * _EDGE_ROWS else rows[:_EDGE_ROWS] + rows[-_EDGE_ROWS:]
