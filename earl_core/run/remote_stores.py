"""The shard stores of a run, one on each of its hosts, and what the controller asks of them.

`StoreCommands` has what it asks, with JSON arguments and results; in the daemon of another host it
is a `HostStore`, which holds the store for the run and serves its ranges.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import feather

from earl_core.config import parse_config
from earl_core.dispatch.remote.bandwidth import fetch_probe, publish_probe
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.dispatch.shards.manifest import ManifestError, ShardEntry
from earl_core.dispatch.shards.shard import open_batch
from earl_core.dispatch.shards.store import ShardStore
from earl_core.run.run_stores import claim, run_store, sweep_unneeded
from earl_core.system.files import writing_atomic
from earl_core.system.shared_memory import Room, file_system_bytes

_RELEASE_SECONDS = 2.0
"""Longest wait for the readers of a measurement that has ended."""

Ask = Callable[..., Any]
"""Calls a method, named by the first argument, of another host's `HostStore`; raises
`ConnectionError` when the host is lost."""


class StoreCommands:
    """Commands on the store of one host."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store

    @property
    def directory(self) -> Path:
        """Directory of the store."""
        return self._store.directory

    def adopt(self, files: list[str]) -> None:
        """Keep these files and remove the others, as `ShardStore.adopt` does."""
        self._store.adopt(set(files))

    def room(self) -> dict[str, int | None]:
        """`weights`: bytes that published weights can have; `size`: of the file system. None: there
        is no limit."""
        self._store.prepare()
        weights = self._store.pool.room_for_weights()
        return {"weights": weights, "size": file_system_bytes(self._store.directory)}

    def problem(self, entry: dict[str, Any], checksum: bool) -> str:
        """Return the reason why a shard cannot be read; empty when it can."""
        try:
            self._store.verify(ShardEntry.model_validate(entry), checksum)
        except ManifestError as error:
            return str(error)
        return ""

    def release(self, entry: dict[str, Any]) -> bool:
        """Release the shard in the store, as `ShardStore.release` does."""
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
        """Tell whether a sealed file of this size lies in the store."""
        path = self._store.directory / name
        return path.is_file() and path.stat().st_size == size

    def release_others(self, pattern: str, kept: list[str]) -> None:
        """Release the files that match, except those of these names."""
        for path in self._store.directory.glob(pattern):
            if path.name not in kept:
                self._store.pool.release(path)

    def publish_probe(self) -> dict[str, Any]:
        """Publish a shard in the store for others to fetch, and return its entry as a mapping."""
        return publish_probe(self._store).model_dump(mode="json")

    def fetch_probe(self, entry: dict[str, Any], address: str, port: int, token: str) -> float:
        """The bytes/s at which a probe comes from another host; see `bandwidth.fetch_probe`."""
        return fetch_probe(ShardEntry.model_validate(entry), (address, port), token)

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
    """The store of a host where the controller is not. config: a dumped `RunConfig`. address: where
    the range server listens."""

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
    """The stores on all hosts of a run. here: the controller's own."""

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
        """Verify the shard on its host, as `ShardStore.verify`; a lost host's shard is gone."""
        try:
            problem = self._ask(entry.host, "problem", entry.model_dump(mode="json"), checksum)
        except ConnectionError as error:
            problem = f"the shard {entry.file} is gone: {error}"
        if problem:
            raise ManifestError(problem)

    def release(self, entry: ShardEntry) -> bool:
        """Release the shard on its host, as `ShardStore.release` does; true for a lost host."""
        with suppress(ConnectionError):
            return bool(self._ask(entry.host, "release", entry.model_dump(mode="json")))
        return True

    def fetch_bandwidth(self, servers: Mapping[str, tuple[str, int]], token: str) -> float:
        """bytes/s of the slowest host that fetches from the next one, all at a time; 0: this is the
        only host. servers: where the ranges of each host are served.

        Raises `PoolFull`, and what a read raises when hosts do not reach each other.
        """
        if not self._away:
            return 0.0
        hosts = sorted(servers)
        probes: dict[str, dict[str, Any]] = {}

        def fetch(host: str, other: str) -> float:
            return float(self._ask(host, "fetch_probe", probes[other], *servers[other], token))

        def publish(host: str) -> None:
            probes[host] = self._ask(host, "publish_probe")

        try:
            with ThreadPoolExecutor(len(hosts)) as pool:
                list(pool.map(publish, hosts))
                return min(pool.map(fetch, hosts, [*hosts[1:], hosts[0]]))
        finally:
            # A server may hold what a reader has in full already, for a moment.
            deadline = time.monotonic() + _RELEASE_SECONDS
            for host, entry in probes.items():
                while not self._ask(host, "release", entry) and time.monotonic() < deadline:
                    time.sleep(0.01)

    def have(self, name: str, size: int) -> bool:
        """Tell whether every host has a sealed file of this size."""
        return all(self._every("has", name, size))

    def room(self) -> Room | None:
        """Return the room of the host that has least for weights; None where none has a limit."""
        found = [
            Room(self._here.directory, each["weights"], each["size"])
            for each in self._every("room")
            if each["size"] is not None
        ]
        return min(found, key=lambda room: room.free, default=None)

    def release_others(self, pattern: str, kept: Collection[str]) -> None:
        """Release the files that match on every host, except those of these names."""
        self._every("release_others", pattern, sorted(kept))

    def used_bytes(self) -> int:
        """Add up the used bytes of all hosts."""
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
        """Call the method on all hosts that are not lost."""
        found = [getattr(self._here, method)(*arguments)]
        for ask in self._away.values():
            with suppress(ConnectionError):
                found.append(ask(method, *arguments))
        return found
