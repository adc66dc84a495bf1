"""`earl bisect`: where two runs begin to differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Console

from earl_core.comparison import Bisection, bisect, recorded_runs
from earl_core.comparison.bisection import Difference
from earl_core.comparison.rows import RowDifference
from earl_core.secrets import shareable_values
from earl_core.system.plural import plural
from flows.cli.found_runs import find_run
from flows.cli.tables import make_console, rows_table

_MOST_CELLS = 6
"""Columns of a row that are printed; --json has all."""
_GONE = "gone, of one run or both: only what the seals say can be compared"


def bisect_runs(one: str, other: str, runs_directory: str, as_json: bool) -> None:
    """Print the first stage that differs, and what the records say of it. Raises `ConfigError`,
    `RunDamaged`."""
    found = bisect(*recorded_runs([find_run(run, runs_directory) for run in (one, other)]))
    if as_json:
        print(json.dumps(shareable_values(_plain(found)), indent=1))
        return
    _print(found, make_console())


def _plain(value: Any) -> Any:
    """Records as mappings."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _print(found: Bisection, console: Console) -> None:
    one, other = found.labels
    iteration, stage = found.until
    counted = plural(found.compared, "sealed stage")
    console.print(f"{one} → {other}: {counted} compared, until {stage} of iteration {iteration}.")
    if found.plan is not None:
        _list(f"The plans differ in iteration {found.plan.iteration}:", found.plan.changes, console)
    if found.difference is None:
        console.print("No stage has equal inputs and other outputs.", style="bold")
    else:
        _print_difference(found.difference, console)
    _list("Told apart by nothing, or only by their layout:", found.notes, console)
    _list("Not as it was written or sealed:", found.damage, console)


def _print_difference(found: Difference, console: Console) -> None:
    console.print(
        f"\nFirst difference: {found.stage} of iteration {found.iteration}", style="bold red"
    )
    _list("It has read", found.inputs, console)
    _list("Its outputs differ", found.outputs, console)
    if found.rows is not None:
        _print_rows(found.rows, found.source, console)
    elif not found.weights and found.inputs:
        _list("Rows", [_GONE], console)
    if found.weights is not None:
        tensors = found.weights
        most = "" if tensors.most is None else f", by {tensors.most:.3g} at most"
        first = "" if tensors.first is None else f", first at element {tensors.first}"
        names = ", ".join(tensors.differing[:3]) + (" …" if len(tensors.differing) > 3 else "")
        told = f"{len(tensors.differing)} of {tensors.tensors} tensors differ{most}"
        _list("Weights of the checkpoints", [f"{told}: {names}{first}"], console)
    metrics = [f"{name}: {a:g} → {b:g}" for name, (a, b) in _told_apart(found.metrics)]
    _list("Its metrics differ", metrics, console)
    _list("What the records name as causes", [each.text for each in found.causes], console)


def _told_apart(metrics: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Those that six digits tell apart."""
    for name, (one, other) in metrics.items():
        if f"{one:g}" != f"{other:g}":
            yield name, (one, other)


def _print_rows(rows: RowDifference, source: str, console: Console) -> None:
    columns = ", ".join(f"{name} in {count}" for name, count in rows.columns.items())
    lines = [f"{plural(rows.compared, 'row')} of both in the {source}; differing: {columns or 0}"]
    for lone, whose in zip(rows.missing, ("first", "second"), strict=True):
        if lone:
            lines.append(f"of the {whose} run alone: {plural(len(lone), 'row')}, from {lone[0]} on")
    _list("Rows", lines, console)
    table = [
        {
            "row": " ".join(f"{name.removesuffix('_id')} {number}" for name, number in ids.items()),
            "column": cell.column + ("" if cell.place is None else f"[{cell.place}]"),
            "first run": cell.one,
            "second run": cell.other,
        }
        for ids, cells in rows.rows
        for cell in cells[:_MOST_CELLS]
    ]
    if table:
        console.print(rows_table(table, {"column": "bold"}))


def _list(heading: str, lines: Iterable[str], console: Console) -> None:
    lines = shareable_values(list(lines))
    if lines:
        console.print(heading, style="bold")
        for line in lines:
            console.print(f"  - {line}")
