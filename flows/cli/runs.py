"""`earl runs`: the runs of a directory, newest first. None of them is locked or changed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich.filesize import decimal

from earl_core.config.yaml_text import read_yaml
from earl_core.run.lock import is_locked
from earl_core.run.record import is_finished, read_lines
from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text
from flows.cli.found_runs import activities_of, branch_of, iterations_of
from flows.cli.tables import duration, make_console, rows_table
from tasks.reports.lines import mean_return, signed

State = Literal["training", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class RunSummary:
    """A run at a glance.

    iterations_done of `iterations`, which is None where its configuration cannot be read. branch:
    the one that it is in, None where it never went back by itself.
    doing: stages that go on, by iteration, where it trains. mean_return: of the last iteration.
    changed: seconds since 1970. size_bytes: of its directory.
    """

    name: str
    state: State
    iterations_done: int
    iterations: int | None
    branch: int | None
    doing: list[str]
    mean_return: float | None
    changed: float
    size_bytes: int


def summarize(path: Path) -> RunSummary:
    """Summarize the run in this directory by its own records."""
    lines = iterations_of(path)
    config = path / "config.yaml"
    changed = max([config.stat().st_mtime, *(float(line["time"]) for line in lines[-1:])])
    state = state_of(path)
    return RunSummary(
        name=path.name,
        state=state,
        iterations_done=int(lines[-1]["iteration"]) + 1 if lines else 0,
        iterations=_iterations(config),
        branch=branch_of(path),
        doing=activities_of(path) if state == "training" else [],
        mean_return=mean_return(lines[-1]) if lines else None,
        changed=changed,
        size_bytes=_size(path),
    )


def state_of(path: Path) -> State:
    """Failed: its last process said so at its end; stopped: it was ended, or killed."""
    if is_locked(path):
        return "training"
    if is_finished(path):
        return "finished"
    ledger = read_lines(path / "ledger.jsonl")
    failed = bool(ledger) and (ledger[-1]["stage"], ledger[-1]["event"]) == ("run", "failed")
    return "failed" if failed else "stopped"


def list_runs(runs_directory: str, as_json: bool) -> None:
    """Print all runs of a directory. Raises `ConfigError` where there is no such directory."""
    home = Path(runs_directory)
    if not home.is_dir():
        raise ConfigError(
            f"there is no directory {home}",
            remedy="name another with --runs-directory, or start a run, such as earl demo",
        )
    found = [summarize(config.parent) for config in home.glob("*/config.yaml")]
    found.sort(key=lambda run: run.changed, reverse=True)
    if as_json:
        print(json.dumps([_plain(run) for run in found], indent=1))
        return
    if not found:
        print(f"There are no runs in {home}/.")
        return
    now = time.time()
    rows = [
        {
            "run": run.name,
            "state": run.state,
            "iterations": f"{run.iterations_done} of {run.iterations or '?'}",
            "branch": str(run.branch or ""),
            "now": ", ".join(run.doing),
            "return": signed(run.mean_return, 2),
            "last change": f"{duration(max(0.0, now - run.changed))} ago",
            "size": decimal(run.size_bytes),
        }
        for run in found
    ]
    make_console().print(rows_table(rows, {"run": "bold"}))


def _plain(run: RunSummary) -> dict[str, object]:
    changed = datetime.fromtimestamp(run.changed, UTC).isoformat(timespec="seconds")
    return {**asdict(run), "changed": changed}


def _iterations(config: Path) -> int | None:
    # As it stands there: a run of another version is listed as well.
    try:
        wanted = read_yaml(read_text(config, str(config)), str(config))["iterations"]
    except (OSError, ConfigError, KeyError, TypeError):
        return None
    return wanted if isinstance(wanted, int) else None


def _size(path: Path) -> int:
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except OSError:
                continue  # a run that trains removes files meanwhile
    return total
