"""Where a run's shards lie in shared memory, and what starting or ending a run does to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from earl_core.config.run import RunConfig
from earl_core.dispatch.store import ShardStore
from earl_core.files import write_atomic
from earl_core.run.lock import is_locked

_OWNER = "owner.json"


def run_store(run_directory: str | Path, config: RunConfig) -> ShardStore:
    """The shard store of the run in `run_directory`; its name is the run's uid."""
    uid = json.loads((Path(run_directory) / "run.json").read_text())["uid"]
    return ShardStore(Path(config.dispatch.directory) / uid, config.dispatch.max_bytes)


def claim(store: ShardStore, run_directory: Path) -> None:
    """Say whose shards these are, so that others can tell when nobody needs them."""
    store.prepare()
    owner = {"run_directory": str(run_directory.resolve()), "time": time.time()}
    write_atomic(store.directory / _OWNER, json.dumps(owner).encode())


@dataclass(frozen=True)
class StoreState:
    """One run's folder in shared memory, as `earl shards list` shows it."""

    directory: Path
    run_directory: Path | None
    bytes: int
    live: bool
    finished: bool
    age_hours: float


def list_stores(root: Path) -> Iterator[StoreState]:
    """Every run's folder under the dispatch directory."""
    for directory in sorted(root.iterdir()) if root.is_dir() else ():
        if not directory.is_dir():
            continue
        run_directory, age = _owner(directory)
        exists = run_directory is not None and (run_directory / "run.json").is_file()
        yield StoreState(
            directory=directory,
            run_directory=run_directory,
            bytes=ShardStore(directory, 1).used_bytes(),
            live=exists and run_directory is not None and is_locked(run_directory),
            finished=not exists or _finished(run_directory),
            age_hours=age / 3600,
        )


def sweep(root: Path, retain_hours: float | None) -> list[Path]:
    """Remove folders that no live run owns; returns them.

    With `retain_hours` None all of them, else those of finished or deleted runs and those older.
    """
    removed = []
    for state in list_stores(root):
        if state.live:
            continue
        if retain_hours is None or state.finished or state.age_hours > retain_hours:
            ShardStore(state.directory, 1).remove()
            removed.append(state.directory)
    return removed


def _owner(directory: Path) -> tuple[Path | None, float]:
    try:
        owner = json.loads((directory / _OWNER).read_text())
        return Path(owner["run_directory"]), time.time() - float(owner["time"])
    except (OSError, ValueError, KeyError):
        # A folder without an owner's note is being made right now, or was never finished.
        age = time.time() - directory.stat().st_mtime
        return (None, age) if age > 60 else (directory, age)


def _finished(run_directory: Path | None) -> bool:
    if run_directory is None:
        return True
    try:
        return bool(json.loads((run_directory / "run.json").read_text()).get("finished"))
    except (OSError, ValueError):
        return True
