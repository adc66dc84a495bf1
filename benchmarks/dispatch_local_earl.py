"""EARL's way, and the copy that is its limit, in the same processes in turn."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dispatch_local_batch import COLUMNS, SCHEMA, Size, Source, check
from benchmarks.dispatch_local_group import Group
from earl_core.dispatch import Batch, Manifest, ShardEntry, ShardStore
from earl_core.dispatch.shards.skeleton import make_skeleton

SHARED_MEMORY = Path("/dev/shm")
_BUFFER_BYTES = 512 * 2**20
"""Of a copy's destination a process at most; what does not fit goes over it again."""
_RELEASE_SECONDS = 30.0


class Producer:
    """Fills a shard in place from its source, or copies its source to ordinary memory."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # A process's first skeleton imports much; that is no part of a batch.
        make_skeleton(SCHEMA, 1, dict.fromkeys(COLUMNS, np.ones(1, np.int64)), {})

    def prepare(self, size: Size, directory: Path, max_bytes: int) -> None:
        """Make the source and the copy's destination, both faulted."""
        self._size = size
        self._store = ShardStore(directory, max_bytes)
        self._source = Source(size, self._rank)
        self._copies = {name: _buffer(size, dtype) for name, dtype in COLUMNS.items()}
        self.copy()

    def copy(self) -> None:
        """The limit: the share's columns into memory whose pages are there."""
        for name, into in self._copies.items():
            left = self._size.share * self._size.tokens
            while left > 0:
                self._source.fill(name, into[:left])
                left -= len(into)

    def publish(self, complete: bool) -> ShardEntry:
        """Fill a shard in place and seal it; with `complete` wait for its checksum."""
        rows = self._source.rows
        lengths = np.full(len(rows), self._size.tokens, np.int64)
        with self._store.create(
            stage="rollout",
            iteration=0,
            rank=self._rank,
            schema=SCHEMA,
            rows=len(rows),
            lengths=dict.fromkeys(COLUMNS, lengths),
        ) as writer:
            writer.values("sample_id")[:] = rows
            for name in COLUMNS:
                self._source.fill(name, writer.values(name))
            self._sealed = writer.seal()
        if complete:
            return self._store.complete(self._sealed)
        entry = self._sealed.model_copy()
        entry._pending = None  # what computes the checksum stays here
        return entry

    def complete(self) -> ShardEntry:
        """The last shard's entry, with its checksum."""
        return self._store.complete(self._sealed)

    def drop(self) -> None:
        """Let everything go."""
        del self._source, self._copies, self._store


class Consumer:
    """Views of its rows, and the copy of them into a training buffer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def prepare(self, size: Size, directory: Path, max_bytes: int) -> None:
        """Make the training buffer, faulted."""
        self._size = size
        self._rows = size.wanted_by(self._rank)
        self._store = ShardStore(directory, max_bytes)
        self._buffer = {name: _buffer(size, dtype) for name, dtype in COLUMNS.items()}
        self._batch: Batch | None = None
        self._views: dict[str, list[np.ndarray]] = {}

    def fetch(self, manifest: Manifest, verify: bool) -> None:
        """A view of every row of every column."""
        self._batch = Batch(self._store, [manifest], rows=self._rows, verify=verify)
        self._views = {name: self._batch.list_rows(name) for name in COLUMNS}

    def pack(self) -> None:
        """Copy all rows into the training buffer, a bufferful at a time."""
        for name, rows in self._views.items():
            into = self._buffer[name]
            fit = max(1, len(into) // self._size.tokens)
            for first in range(0, len(rows), fit):
                part = rows[first : first + fit]
                np.concatenate(part, out=into[: len(part) * self._size.tokens])

    def check(self) -> None:
        """Raise unless every value arrived."""
        for name, rows in self._views.items():
            check(self._size, self._rows, name, rows)

    def close(self) -> None:
        """Give the leases back."""
        self._views.clear()
        if self._batch is not None:
            self._batch.close()
            self._batch = None

    def drop(self) -> None:
        """Let everything go."""
        del self._buffer, self._store


@dataclass
class EarlTimes:
    """Seconds of each repetition. total: from the first producer's start to the last copy into the
    training buffers, with the manifest's way through the controller in between."""

    publish: list[float] = field(default_factory=list)
    fetch: list[float] = field(default_factory=list)
    pack: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    checksum: list[float] = field(default_factory=list)

    @property
    def moved(self) -> list[float]:
        """Publishing and fetching together."""
        return [sum(each) for each in zip(self.publish, self.fetch, strict=True)]


class Earl:
    """N producers, N consumers and the store between them, for one size. A context manager."""

    def __init__(self, producers: Group, consumers: Group, size: Size) -> None:
        self._producers, self._consumers, self._size = producers, consumers, size
        self._root = Path(tempfile.mkdtemp(prefix="earl-bench-", dir=SHARED_MEMORY))
        max_bytes = 3 * size.bytes + 2**26
        self._store = ShardStore(self._root / "run", max_bytes)
        self._arguments = (size, self._root / "run", max_bytes)

    def __enter__(self) -> Earl:
        self._producers.call("prepare", *self._arguments)
        self._consumers.call("prepare", *self._arguments)
        return self

    def __exit__(self, *unused: object) -> None:
        with contextlib.suppress(RuntimeError):  # the processes may be the reason for ending
            self._producers.call("drop")
            self._consumers.call("drop")
        shutil.rmtree(self._root, ignore_errors=True)

    def copy(self) -> float:
        """Seconds of the limit."""
        return self._producers.call("copy").seconds

    def move(self, times: EarlTimes, verify: bool = False, check: bool = False) -> None:
        """One batch from all producers to all consumers; adds a repetition to `times`."""
        published = self._producers.call("publish", verify)
        manifest = _manifest(published.results)
        fetched = self._consumers.call("fetch", manifest, verify)
        packed = self._consumers.call("pack")
        completed = self._producers.call("complete")
        if check:
            self._consumers.call("check")
        self._consumers.call("close")
        for entry in completed.results:
            self._release(entry)
        times.publish.append(published.seconds)
        times.fetch.append(fetched.seconds)
        times.pack.append(packed.seconds)
        times.total.append(packed.end - published.start)
        times.checksum.append(max(0.0, completed.end - published.end))

    def _release(self, entry: ShardEntry) -> None:
        deadline = time.monotonic() + _RELEASE_SECONDS
        while not self._store.release(entry):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{entry.file} is still leased after its batch was closed")
            time.sleep(0.001)


@contextlib.contextmanager
def earl_groups(workers: int) -> Iterator[tuple[Group, Group]]:
    """Producers and consumers."""
    with Group(Producer, workers) as producers, Group(Consumer, workers) as consumers:
        yield producers, consumers


def _buffer(size: Size, dtype: np.dtype[Any]) -> np.ndarray:
    """Flat, faulted, for a share of a column, or for whole rows of it where that is too much."""
    most = max(1, _BUFFER_BYTES // len(COLUMNS) // (size.tokens * dtype.itemsize))
    return np.ones(min(size.share, most) * size.tokens, dtype)


def _manifest(entries: list[ShardEntry]) -> Manifest:
    return Manifest(
        run="benchmark",
        iteration=0,
        stage="rollout",
        key="benchmark",
        policy_version=0,
        shards=tuple(entries),
    )
