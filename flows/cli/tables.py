"""Tables and panels of rich, made of plain values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from earl_core.config import RunConfig
from earl_core.config.table import resolved_rows
from flows.cli.progress import (
    Activity,
    EvaluationRow,
    IterationRow,
    Snapshot,
    outcome_names,
)

_EVALUATIONS_SHOWN = 4
_PIPE_WIDTH = 140
_LONG = 1e6
_COLORS = {"win": "green", "draw": "yellow", "loss": "red", "illegal": "magenta"}


def make_console() -> Console:
    """Standard output; pipes and logs get lines that are wide enough for every table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def resolved_table(config: RunConfig) -> Table:
    """What the sizes of a configuration come to."""
    table = Table(title=f"Run {config.name}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", style="cyan", overflow="fold")
    table.add_column("from", style="dim", overflow="fold")
    for row in resolved_rows(config):
        table.add_row(*row)
    return table


def screen(snapshot: Snapshot, spinner: Spinner) -> RenderableType:
    """The live display of a run in progress."""
    parts: list[RenderableType] = [_head(snapshot), _activity(snapshot.activity, spinner)]
    if snapshot.rows:
        parts.append(iteration_table(snapshot.rows))
    if snapshot.evaluations:
        parts.append(evaluation_table(snapshot.evaluations[-_EVALUATIONS_SHOWN:]))
    return Group(*parts)


def _head(snapshot: Snapshot) -> Table:
    head = Table.grid(padding=(0, 1))
    text = f"{snapshot.finished} of {snapshot.iterations} iterations"
    times = f"{duration(snapshot.seconds)} so far"
    remaining = max(0, snapshot.iterations - snapshot.finished)
    if snapshot.iteration_seconds is not None and remaining:
        left = remaining * snapshot.iteration_seconds
        times += f", about {duration(left)} left"
    bar = ProgressBar(total=max(snapshot.iterations, 1), completed=snapshot.finished, width=30)
    head.add_row(Text(text, style="bold"), bar, Text(times, style="dim"))
    return head


def _activity(activity: Activity, spinner: Spinner) -> Table:
    line = Table.grid(padding=(0, 1))
    cells: list[RenderableType] = [spinner, Text(activity.text or "working", style="bold cyan")]
    if activity.total:
        cells.append(ProgressBar(total=activity.total, completed=activity.done, width=20))
    cells.append(Text(activity_numbers(activity), style="dim"))
    line.add_row(*cells)
    return line


def activity_numbers(activity: Activity) -> str:
    """The numbers that go with the current stage, such as `12/64 episodes, 840 tokens/s`."""
    numbers, parts = activity.numbers, []
    if activity.total:
        parts.append(f"{activity.done:.0f}/{activity.total:.0f} {activity.unit}")
    if numbers.get("tokens_per_second"):
        parts.append(f"{numbers['tokens_per_second']:,.0f} tokens/s")
    if "return" in numbers:
        parts.append(f"return {signed(numbers['return'], 2)}")
    return ", ".join(parts)


def iteration_table(rows: Sequence[IterationRow]) -> Table:
    """The last iterations, newest last."""
    names = outcome_names([row.outcomes for row in rows])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("iteration", justify="right")
    table.add_column("return", justify="right")
    for name in names:
        table.add_column(f"{name} %", justify="right", style=_COLORS.get(name, ""))
    for heading in ("context", "max", "rollout tok/s", "update tok/s", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.iteration),
            signed(row.mean_return, 2),
            *[number(row.outcomes.get(name, 0.0) * 100, "{:.0f}") for name in names],
            number(row.context_mean, "{:.0f}"),
            number(row.context_max, "{:.0f}"),
            number(row.rollout_tokens_per_second, "{:,.0f}"),
            number(row.update_tokens_per_second, "{:,.0f}"),
            f"{row.seconds:.1f}",
        )
    return table


def evaluation_table(rows: Sequence[EvaluationRow]) -> Table:
    """Held-out evaluations with their intervals."""
    names = outcome_names([row.outcomes for row in rows])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("evaluation", justify="right")
    table.add_column("return", justify="right")
    for name in names:
        heading = f"{name} % (95 %)"
        table.add_column(heading, justify="right", style=_COLORS.get(name, ""), no_wrap=True)
    for row in rows:
        cells = [interval(row.outcomes[name]) if name in row.outcomes else "" for name in names]
        table.add_row(str(row.version), signed(row.mean_return, 2), *cells)
    return table


def interval(value: tuple[float, float, float]) -> str:
    """A share with its 95 % interval in per cent, such as `48 (42-54)`."""
    share, low, high = (100 * part for part in value)
    return f"{share:.0f} ({low:.0f}-{high:.0f})"


def number(value: float | None, form: str) -> str:
    """The value in that form, or nothing."""
    return "" if value is None else form.format(value)


def signed(value: float | None, places: int) -> str:
    """The value with its sign, or nothing; long numbers in four digits and an exponent."""
    if value is None:
        return ""
    return f"{value:+.4g}" if abs(value) >= _LONG else f"{value:+.{places}f}"


def duration(seconds: float) -> str:
    """Such as `45 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
