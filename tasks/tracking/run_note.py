"""The text on top of a run's page in MLflow: what it is, how it goes, where to look."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earl_core.run.directory import RunDirectory
from earl_core.system.plural import plural
from tasks.reports.lines import Line, mean_return, outcome_shares, signed


def mlflow_page(record: Mapping[str, Any], tab: str = "model-metrics") -> str | None:
    """The address of a run's page at an MLflow server; None without a server. record: the run's.
    tab: of the page; its curves unless told otherwise."""
    known = record.get("tracking") or {}
    site, identity = str(known.get("uri", "")), known.get("run_id")
    if not identity or not site.startswith(("http://", "https://")):
        return None
    page = f"{site.rstrip('/')}/#/experiments/{known['experiment_id']}/runs/{identity}"
    return f"{page}/{tab}"


def run_note(run: RunDirectory) -> str:
    """Markdown about the run as its directory has it now."""
    lines: list[Line] = [*run.metrics()]
    evaluations = run.evaluations()
    held_out: list[Line] = [{"iteration": each.iteration, **each.metrics} for each in evaluations]
    parts = [_what(run), _how(lines, held_out, run.config.iterations), _where(run)]
    return "\n\n".join(part for part in parts if part)


def _what(run: RunDirectory) -> str:
    config = run.config
    played = ", ".join(f"`{each.played}`" for each in config.played.values())
    model = Path(config.model.shown).name
    return (
        f"**{model}** learns {played}: {plural(config.iterations, 'iteration')} of {config.name}."
    )


def _how(lines: list[Line], held_out: list[Line], wanted: int) -> str:
    done = int(lines[-1]["iteration"]) + 1 if lines else 0
    rows = [f"* Training, {done} of {wanted} done: {_went(lines)}"]
    rows += [f"* Held-out episodes: {_went(held_out)}"] if held_out else []
    return "\n".join(rows)


def _went(lines: list[Line]) -> str:
    """Write the course from the first line to the last."""
    texts = dict.fromkeys(map(_short, (*lines[:1], *lines[-1:])))
    return " → ".join(texts) or "nothing yet"


def _short(line: Line) -> str:
    value, shares = mean_return(line), outcome_shares(line)
    parts = [f"return {signed(value, 3)}"] if value is not None else []
    parts += [f"win {100 * shares['win']:.0f} %"] if "win" in shares else []
    return ", ".join(parts) or "no return"


def _where(run: RunDirectory) -> str:
    place = run.path.resolve()
    rows = [
        f"* Run directory: `{place}`",
        f"* Go on with it: `earl resume {shlex.quote(str(place))}`",
        "* What the numbers mean: `metrics.json` among the artifacts",
    ]
    if (curves := mlflow_page(run.record)) is not None:
        rows.insert(0, f"* [Curves]({curves}) · [episodes]({mlflow_page(run.record, 'traces')})")
    return "\n".join(rows)
