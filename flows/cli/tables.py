"""Tables and panels of rich, made of plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, JustifyMethod, RenderableType
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

Row = Mapping[str, str]

_EVALUATIONS_SHOWN = 4
_PIPE_WIDTH = 140
_LONG = 1e6
_NUMERIC = re.compile(
    r"[-+]?[\d,.]*(e[-+]\d+)?%?( \([\d-]+\)| - [\d.]+%| [%KMGTik]*B?| [sh]| (min|h) \d+ (s|min))?"
)
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


def rows_table(rows: Sequence[Row], styles: Mapping[str, str] | None = None) -> Table:
    """Rows as a table of all columns in which any of them has something; numbers to the right."""
    columns = dict.fromkeys(name for row in rows for name, cell in row.items() if cell)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numeric = all(_NUMERIC.fullmatch(row.get(column, "")) for row in rows)
        style = (styles or {}).get(column, "")
        justify: JustifyMethod = "right" if numeric else "left"
        table.add_column(column, justify=justify, no_wrap=numeric, style=style, overflow="fold")
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    return table


def iteration_table(rows: Sequence[IterationRow]) -> Table:
    """The last iterations, newest last."""
    names = outcome_names([row.outcomes for row in rows])
    cells = [
        {
            "iteration": str(row.iteration),
            "return": signed(row.mean_return, 2),
            **{f"{name} %": f"{row.outcomes.get(name, 0.0) * 100:.0f}" for name in names},
            "context": number(row.context_mean, "{:.0f}"),
            "max": number(row.context_max, "{:.0f}"),
            "rollout tok/s": number(row.rollout_tokens_per_second, "{:,.0f}"),
            "update tok/s": number(row.update_tokens_per_second, "{:,.0f}"),
            "seconds": f"{row.seconds:.1f}",
        }
        for row in rows
    ]
    return rows_table(cells, {f"{name} %": color for name, color in _COLORS.items()})


def evaluation_table(rows: Sequence[EvaluationRow]) -> Table:
    """Held-out evaluations with their intervals."""
    names = outcome_names([row.outcomes for row in rows])
    cells = [
        {
            "evaluation": str(row.version),
            "return": signed(row.mean_return, 2),
            **{f"{n} % (95 %)": interval(row.outcomes[n]) for n in names if n in row.outcomes},
        }
        for row in rows
    ]
    return rows_table(cells, {f"{name} % (95 %)": color for name, color in _COLORS.items()})


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
