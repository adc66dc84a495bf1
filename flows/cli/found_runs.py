"""Runs as commands see them: found by name, read without locking them."""

from __future__ import annotations

from pathlib import Path

from earl_core.run.checkpoints import evaluated
from earl_core.run.record import RunDamaged, read_lines, read_record
from earl_core.system.errors import ConfigError
from tasks.reports.lines import Line


def find_run(run: str, runs_directory: str) -> Path:
    """The directory of a run given by name or by path; raises `ConfigError`."""
    for path in (Path(run), Path(runs_directory) / run):
        if (path / "config.yaml").is_file():
            return path
    known = sorted(path.parent.name for path in Path(runs_directory).glob("*/config.yaml"))
    listed = f"it holds {', '.join(known)}" if known else "it holds no runs"
    raise ConfigError(
        f"there is no run {run!r}: give a run directory, or the name of one in "
        f"{runs_directory}/ ({listed})"
    )


def iterations_of(path: Path) -> list[Line]:
    """Every finished iteration of a run, ascending."""
    latest = {line["iteration"]: line for line in read_lines(path / "metrics.jsonl")}
    return [latest[number] for number in sorted(latest)]


def evaluations_of(path: Path) -> list[Line]:
    """A line for each sealed evaluation, by ascending policy version."""
    return [{"iteration": each.iteration, **each.metrics} for each in evaluated(path)]


def tracking_uri(path: Path) -> str | None:
    """Return the address at which the run was tracked; None when it was not."""
    try:
        record = read_record(path)
    except (OSError, RunDamaged):
        return None
    uri = (record.get("tracking") or {}).get("uri")
    return uri if isinstance(uri, str) else None
