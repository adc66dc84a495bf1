"""Runs as commands see them: found by name, read without locking them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from earl_core.deployment.stages import STAGES, stage_of
from earl_core.run.branches import Branches
from earl_core.run.checkpoints import evaluated
from earl_core.run.record import RunDamaged, read_lines, read_record
from earl_core.run.told_progress import told_share
from earl_core.system.errors import ConfigError
from tasks.reports.lines import Line

_ENDS = ("sealed", "reused", "failed")


def find_run(run: str, runs_directory: str) -> Path:
    """The directory of a run given by name or by path; raises `ConfigError`."""
    for path in (Path(run), Path(runs_directory) / run):
        if (path / "config.yaml").is_file():
            # What lies beside a run is found by its name.
            return path if path.name not in ("", "..") else path.resolve()
    known = sorted(path.parent.name for path in Path(runs_directory).glob("*/config.yaml"))
    listed = f"it holds {', '.join(known)}" if known else "it holds no runs"
    raise ConfigError(
        f"there is no run {run!r}: give a run directory, or the name of one in "
        f"{runs_directory}/ ({listed})"
    )


def iterations_of(path: Path) -> list[Line]:
    """Every finished iteration of a run, ascending."""
    latest = {line["iteration"]: line for line in read_lines(path / "metrics.jsonl")}
    return [_measured(latest[number]) for number in sorted(latest)]


def _measured(line: Line) -> Line:
    """The line without metrics that are no number, as a loss of one's own may tell: no chart has a
    place for them."""
    return {k: v for k, v in line.items() if not isinstance(v, float) or math.isfinite(v)}


def activities_of(path: Path) -> list[str]:
    """The stages that the newest attempt has begun and not ended, by iteration, such as `12:
    update` and `13: rollout 61 %`."""
    ledger = read_lines(path / "ledger.jsonl")
    newest = max((line["attempt"] for line in ledger), default=0)
    open_: dict[tuple[int, str], None] = {}
    for line in ledger:
        key = line["iteration"], line["stage"]
        if line["attempt"] == newest and line["event"] == "started":
            open_[key] = None
        elif line["event"].startswith(_ENDS):
            open_.pop(key, None)
    found = []
    for iteration, name in sorted(open_, key=lambda key: key[0]):
        share = told_share(path, iteration, name)
        stage = stage_of(name)
        told = (STAGES[stage].told_as if stage in STAGES else "") or name
        found.append(f"{iteration}: {told}" + ("" if share is None else f" {100 * share:.0f} %"))
    return found


def evaluations_of(path: Path) -> list[Line]:
    """A line for each sealed evaluation, by ascending policy version."""
    return [_measured({"iteration": each.iteration, **each.metrics}) for each in evaluated(path)]


def tracking_uri(path: Path) -> str | None:
    """Return the address at which the run was tracked; None when it was not."""
    uri = (_record(path).get("tracking") or {}).get("uri")
    return uri if isinstance(uri, str) else None


def branch_of(path: Path) -> int | None:
    """The number of the branch that the run is in; None before the guard has had it go back."""
    opened = Branches.of(_record(path)).opened
    return opened[-1].number if opened else None


def _record(path: Path) -> dict[str, Any]:
    try:
        return read_record(path)
    except (OSError, RunDamaged):
        return {}
