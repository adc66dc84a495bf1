"""Where a run's shards lie in shared memory, and what starting or ending a run does to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from earl_core.config.run import RunConfig
from earl_core.config.services import DispatchConfig
from earl_core.dispatch.spiller import Spiller
from earl_core.dispatch.store import ShardStore
from earl_core.files import read_file, write_atomic
from earl_core.run.lock import is_locked
from earl_core.run.record import RunDamaged, read_record

_OWNER = "owner.json"


def run_store(run_directory: str | Path, config: RunConfig) -> ShardStore:
    """The shard store of the run in `run_directory`; its name is the run's uid."""
    uid = read_record(Path(run_directory))["uid"]
    dispatch = config.dispatch
    return ShardStore(Path(dispatch.directory) / uid, dispatch.max_bytes, dispatch.wait_seconds)


def run_spill(run_directory: str | Path, config: RunConfig) -> Spiller | None:
    """Where copies of the run's shards go; None when they live in memory only."""
    if config.dispatch.spill_url is None:
        return None
    uid = read_record(Path(run_directory))["uid"]
    return Spiller(config.dispatch.spill_url, uid, Path(config.dispatch.directory) / uid)


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


def sweep(root: Path) -> list[Path]:
    """Remove every folder that no live run owns; returns them."""
    return _remove([state for state in list_stores(root) if not state.live])


def sweep_unneeded(root: Path, dispatch: DispatchConfig) -> list[Path]:
    """Remove folders that no run will need; returns them. Open a run before, so that its own stays.

    Those of finished and deleted runs go, then those of stopped runs older than
    `dispatch.retain_hours`, then the oldest until the rest have `dispatch.retain_bytes` together.
    """
    idle = [state for state in list_stores(root) if not state.live]
    unneeded = [s for s in idle if s.finished or s.age_hours > dispatch.retain_hours]
    stopped = sorted((s for s in idle if s not in unneeded), key=lambda state: state.age_hours)
    held = 0
    for state in stopped:
        held += state.bytes
        if held > dispatch.retain_bytes:
            unneeded.append(state)
    return _remove(unneeded)


def _remove(states: list[StoreState]) -> list[Path]:
    for state in states:
        ShardStore(state.directory, 1).remove()
    return [state.directory for state in states]


def _owner(directory: Path) -> tuple[Path | None, float]:
    try:
        owner = json.loads(read_file(directory / _OWNER))
        return Path(owner["run_directory"]), time.time() - float(owner["time"])
    except (OSError, ValueError, KeyError):
        # A folder without an owner's note is being made right now, or was never finished.
        age = time.time() - directory.stat().st_mtime
        return (None, age) if age > 60 else (directory, age)


def _finished(run_directory: Path | None) -> bool:
    if run_directory is None:
        return True
    try:
        return bool(read_record(run_directory).get("finished"))
    except FileNotFoundError:
        return True
    except RunDamaged:
        # Whoever repairs it will want its shards.
        return False
