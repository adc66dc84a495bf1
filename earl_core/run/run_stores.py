"""A run's shards in one host's shared memory: where they lie, and how runs adopt and free them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from earl_core.config.run import RunConfig
from earl_core.config.services import DispatchConfig
from earl_core.dispatch.segments.pool_directory import (
    LIVE,
    StoreMark,
    is_uid,
    read_mark,
    write_mark,
)
from earl_core.dispatch.shards.store import ShardStore
from earl_core.dispatch.spill.spiller import Spiller
from earl_core.run.lock import is_locked
from earl_core.run.record import RunDamaged, check_other_place, read_record, read_uid
from earl_core.system.errors import InUse
from earl_core.system.files import FileLock, device_of, is_held, remove_when_empty

logger = logging.getLogger(__name__)

_SWEEPER_SECONDS = 10.0  # a sweeper that has a store takes milliseconds
_UNCLAIMED_SECONDS = 60.0  # from making a store until its run claims it


def run_store(run_directory: str | Path, config: RunConfig) -> ShardStore:
    """The shard store of the run in `run_directory`; its name is the run's uid."""
    uid = read_uid(run_directory)
    dispatch = config.dispatch
    directory, limits = Path(dispatch.directory) / uid, (dispatch.max_bytes, dispatch.wait_seconds)
    return ShardStore(directory, *limits, versions=config.schedule.versions)


def run_spill(run_directory: str | Path, config: RunConfig) -> Spiller | None:
    """Return the spiller that copies the run's shards; None when they live in memory only."""
    if config.dispatch.spill_url is None:
        return None
    uid = read_uid(run_directory)
    return Spiller(config.dispatch.spill_url, uid, Path(config.dispatch.directory) / uid)


def claim(store: ShardStore, run_directory: Path) -> FileLock:
    """Take a store for a run, so that others can tell when nobody needs it.

    The lock lies in the store itself: whoever sees the store sees that it is in use, even where
    the run directory is not mounted. Raises `InUse` when a live process has the store,
    `ConfigError` when another directory holds the run that it belongs to.
    """
    lock = None
    while lock is None:
        store.prepare()
        mark = read_mark(store.directory)
        if mark is not None and mark.run_directory is not None:
            check_other_place(run_directory, store.directory.name, mark.run_directory)
        lock = _lock_live(store.directory, run_directory)
    try:
        write_mark(store.directory, run_directory.resolve())
    except BaseException:
        lock.release()
        raise
    return lock


def _lock_live(directory: Path, run_directory: Path) -> FileLock | None:
    """The lock of a store; None when a sweeper removed the store meanwhile."""
    try:
        return FileLock(directory / LIVE, _SWEEPER_SECONDS)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        raise InUse(
            f"the shards in {directory} are in use by another process, which sees them from "
            f"another container or has opened {run_directory} under another name: stop it"
        ) from None


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
    """Every run's folder under the dispatch directory: the marked ones of this user."""
    for entry in _folders(root):
        mark = _mark(entry)
        if mark is not None:
            yield _state(Path(entry.path), mark)


def sweep(root: Path) -> list[Path]:
    """Remove every store that no live run owns; returns them."""
    return _remove(root, [state for state in list_stores(root) if not state.live])


def sweep_unneeded(root: Path, dispatch: DispatchConfig) -> list[Path]:
    """Remove stores that no run will need; returns them. Open a run before, so that its own stays.

    Stores of finished and deleted runs go, then those of stopped runs older than
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
    return _remove(root, unneeded)


def _remove(root: Path, states: list[StoreState]) -> list[Path]:
    removed = []
    for state in states:
        try:
            # So that no run claims it while it goes.
            lock = FileLock(state.directory / LIVE)
        except OSError:
            continue  # claimed since it was listed, or gone
        with lock:
            ShardStore(state.directory, 1).remove()
        removed.append(state.directory)
    remove_when_empty(root)
    _warn_of_foreign(root)
    return removed


def _warn_of_foreign(root: Path) -> None:
    """Name what lies beside the stores and is none, links to folders included."""
    foreign = [entry for entry in _folders(root) if _mark(entry) is None]
    if foreign:
        named = ", ".join(path.name for path in foreign[:3])
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        logger.warning(
            "%s holds folders that are not of EARL and are left alone: %s%s", root, named, more
        )


def _folders(root: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return sorted((e for e in entries if e.is_dir()), key=lambda entry: entry.name)
    except OSError:
        return []


def _mark(entry: os.DirEntry[str]) -> StoreMark | None:
    return read_mark(Path(entry.path)) if is_uid(entry.name) else None


def _state(directory: Path, mark: StoreMark) -> StoreState:
    run_directory, age = mark.run_directory, time.time() - mark.time
    # A run locks its directory first, then its store.
    live = is_held(directory / LIVE) or (run_directory is not None and is_locked(run_directory))
    young = run_directory is None and age < _UNCLAIMED_SECONDS
    return StoreState(
        directory=directory,
        run_directory=run_directory,
        bytes=ShardStore(directory, 1).pool.used_bytes(),
        live=live or young,
        finished=run_directory is None or _finished(run_directory, mark.device, directory.name),
        age_hours=age / 3600,
    )


def _finished(run_directory: Path, device: int | None, uid: str) -> bool:
    """Tell whether the run ended or was deleted, or another lies in its place now."""
    try:
        record = read_record(run_directory)
        return bool(record.get("finished")) or record.get("uid") != uid
    except FileNotFoundError:
        # Where its file system is missing, too, it may only not be mounted here.
        return device_of(run_directory) == device
    except (RunDamaged, OSError):
        # Whoever repairs it will want its shards.
        return False
