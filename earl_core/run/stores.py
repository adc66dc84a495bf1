"""A run's shards in shared memory, on each of its hosts: where they lie, what starting or ending a
run does to them, and what the controller asks of a store.

`StoreCommands` has what the controller asks, with JSON arguments and results; in the daemon of
another host it is a `HostStore`, which holds the store for the run and serves its ranges.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import feather

from earl_core.config import parse_config
from earl_core.config.run import RunConfig
from earl_core.config.services import DispatchConfig
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.dispatch.segments.pool_directory import (
    LIVE,
    StoreMark,
    is_uid,
    read_mark,
    write_mark,
)
from earl_core.dispatch.shards.manifest import ManifestError, ShardEntry
from earl_core.dispatch.shards.shard import open_batch
from earl_core.dispatch.shards.store import ShardStore
from earl_core.dispatch.spill.spiller import Spiller
from earl_core.run.lock import is_locked
from earl_core.run.record import RunDamaged, check_other_place, read_record, read_uid
from earl_core.system.errors import InUse
from earl_core.system.files import FileLock, device_of, is_held, remove_when_empty, writing_atomic

logger = logging.getLogger(__name__)

_SWEEPER_SECONDS = 10.0  # a sweeper that has a store takes milliseconds
_UNCLAIMED_SECONDS = 60.0  # from making a store until its run claims it


def run_store(run_directory: str | Path, config: RunConfig) -> ShardStore:
    """The shard store of the run in `run_directory`; its name is the run's uid."""
    uid = read_uid(run_directory)
    dispatch = config.dispatch
    return ShardStore(Path(dispatch.directory) / uid, dispatch.max_bytes, dispatch.wait_seconds)


def run_spill(run_directory: str | Path, config: RunConfig) -> Spiller | None:
    """Where copies of the run's shards go; None when they live in memory only."""
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
    """Whether the run ended or was deleted, or another lies in its place now."""
    try:
        record = read_record(run_directory)
        return bool(record.get("finished")) or record.get("uid") != uid
    except FileNotFoundError:
        # Where its file system is missing, too, it may only not be mounted here.
        return device_of(run_directory) == device
    except (RunDamaged, OSError):
        # Whoever repairs it will want its shards.
        return False


Ask = Callable[..., Any]
"""Calls a method, named by the first argument, of another host's `HostStore`; raises
`ConnectionError` when the host is lost."""


class StoreCommands:
    """On one host."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store

    def adopt(self, files: list[str]) -> None:
        """See `ShardStore.adopt`."""
        self._store.adopt(set(files))

    def reserve(self, size: int) -> None:
        """See `ShardStore.reserve`."""
        self._store.reserve(size)

    def problem(self, entry: dict[str, Any], checksum: bool) -> str:
        """Why a shard cannot be read; empty when it can."""
        try:
            self._store.verify(ShardEntry.model_validate(entry), checksum)
        except ManifestError as error:
            return str(error)
        return ""

    def release(self, entry: dict[str, Any]) -> bool:
        """See `ShardStore.release`."""
        return self._store.release(ShardEntry.model_validate(entry))

    def table(self, entry: ShardEntry) -> pa.Table:
        """A shard without copies; its lease goes with the last view."""
        memory = self._store.open(entry).memory
        batch = open_batch(pa.BufferReader(pa.py_buffer(memory)), f"the shard {entry.file}")
        return pa.Table.from_batches([batch])

    def export(self, entry: dict[str, Any], path: str) -> None:
        """Copy a shard to where the controller can read it."""
        with writing_atomic(Path(path)) as file, open(file, "wb", closefd=False) as stream:
            table = self.table(ShardEntry.model_validate(entry))
            feather.write_feather(table, stream, compression="zstd")

    def has(self, name: str, size: int) -> bool:
        """Whether a sealed file of this size lies in the store."""
        path = self._store.directory / name
        return path.is_file() and path.stat().st_size == size

    def release_others(self, pattern: str, kept: list[str]) -> None:
        """Release the files that match, except those of these names."""
        for path in self._store.directory.glob(pattern):
            if path.name not in kept:
                self._store.pool.release(path)

    def used_bytes(self) -> int:
        """Bytes of all files of the store."""
        return self._store.pool.used_bytes()

    def trim(self) -> None:
        """Give unused memory back."""
        self._store.pool.trim()

    def remove(self) -> None:
        """Remove everything of the run on this host."""
        self._store.remove()


class HostStore(StoreCommands):
    """On a host where the controller is not.

    config: a dumped `RunConfig`. address: where the range server listens.
    """

    def __init__(
        self, run_directory: str, config: Mapping[str, Any], address: str, token: str
    ) -> None:
        parsed = parse_config(config)
        super().__init__(run_store(run_directory, parsed))
        self._lock = claim(self._store, Path(run_directory))
        sweep_unneeded(Path(parsed.dispatch.directory), parsed.dispatch)
        self._server = RangeServer(self._store.directory, token, address)

    def served_at(self) -> tuple[str, int]:
        """Address and port of the range server."""
        return self._server.address


class HostStores:
    """On all hosts of a run. here: the controller's own."""

    def __init__(self, here: ShardStore) -> None:
        self._here = StoreCommands(here)
        self._away: dict[str, Ask] = {}

    def join(self, host: str, ask: Ask, files: Collection[str]) -> None:
        """Manage another host's shards, too; what is not in `files` is released there."""
        ask("adopt", sorted(files))
        self._away[host] = ask

    def table(self, entry: ShardEntry, scratch: Path) -> pa.Table:
        """A shard, wherever it lies. scratch: a directory that all hosts see, through which one of
        another host comes. Raises `ManifestError`, and `ConnectionError` for one of a lost host."""
        if entry.host not in self._away:
            return self._here.table(entry)
        # Should a kill leave it, it is removed as other files that were not finished.
        path = scratch / f".{entry.file}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
            self._ask(entry.host, "export", entry.model_dump(mode="json"), str(path.resolve()))
            return feather.read_table(path, memory_map=False)
        finally:
            path.unlink(missing_ok=True)

    def verify(self, entry: ShardEntry, checksum: bool) -> None:
        """See `ShardStore.verify`; a shard of a host that is lost is gone."""
        try:
            problem = self._ask(entry.host, "problem", entry.model_dump(mode="json"), checksum)
        except ConnectionError as error:
            problem = f"the shard {entry.file} is gone: {error}"
        if problem:
            raise ManifestError(problem)

    def release(self, entry: ShardEntry) -> bool:
        """See `ShardStore.release`."""
        with suppress(ConnectionError):
            return bool(self._ask(entry.host, "release", entry.model_dump(mode="json")))
        return True

    def have(self, name: str, size: int) -> bool:
        """Whether every host has a sealed file of this size."""
        return all(self._every("has", name, size))

    def reserve(self, size: int) -> None:
        """See `ShardStore.reserve`; on every host."""
        self._every("reserve", size)

    def release_others(self, pattern: str, kept: Collection[str]) -> None:
        """Release the files that match on every host, except those of these names."""
        self._every("release_others", pattern, sorted(kept))

    def used_bytes(self) -> int:
        """Of all hosts together."""
        return sum(self._every("used_bytes"))

    def trim(self) -> None:
        """Give unused memory back on every host."""
        self._every("trim")

    def remove(self) -> None:
        """Remove everything of the run on every host."""
        self._every("remove")

    def _ask(self, host: str, method: str, *arguments: Any) -> Any:
        ask = self._away.get(host)
        return ask(method, *arguments) if ask else getattr(self._here, method)(*arguments)

    def _every(self, method: str, *arguments: Any) -> list[Any]:
        """Of all hosts that are not lost."""
        found = [getattr(self._here, method)(*arguments)]
        for ask in self._away.values():
            with suppress(ConnectionError):
                found.append(ask(method, *arguments))
        return found
