"""The batch that has to move, and the processes that make it, copy it and take it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from earl_core.dispatch import Batch, Manifest, ShardEntry, ShardStore
from earl_core.dispatch.shards.skeleton import make_skeleton
from earl_core.trajectory.schema import per_token

COLUMNS: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype("int32"),
    "loss_mask": np.dtype("uint8"),
    "rollout_logprobs": np.dtype("float32"),
    "reference_logprobs": np.dtype("float32"),
    "advantages": np.dtype("float32"),
}
SCHEMA = pa.schema(
    [pa.field("sample_id", pa.int64(), nullable=False)]
    + [per_token(name, pa.from_numpy_dtype(dtype)) for name, dtype in COLUMNS.items()]
)
BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in COLUMNS.values())
_SOURCE_BYTES = 256 * 2**20
"""Most bytes of made-up data of a producer; larger shares repeat it."""
_BUFFER_BYTES = 512 * 2**20
"""Most bytes of a copy's destination in a process; a larger copy goes over it again."""


@dataclass(frozen=True)
class Size:
    """One batch over N producers and N consumers: `samples` rows of `tokens` tokens.

    Producer p makes the rows of its stretch, consumer c gets the rows c, c + N, c + 2N, ..., so
    that every consumer needs rows of every producer.
    """

    name: str
    samples: int
    tokens: int
    workers: int

    @classmethod
    def of_bytes(cls, name: str, size: int, tokens: int, workers: int) -> Size:
        """About `size` bytes of samples of `tokens` tokens."""
        share = round(size / (tokens * BYTES_PER_TOKEN * workers))
        return cls(name, share * workers, tokens, workers)

    @property
    def bytes(self) -> int:
        """Bytes of all columns."""
        return self.samples * self.tokens * BYTES_PER_TOKEN

    @property
    def share(self) -> int:
        """Rows of a producer."""
        return self.samples // self.workers

    def made_by(self, rank: int) -> np.ndarray:
        """int64 sample_ids of a producer's rows."""
        return np.arange(rank * self.share, (rank + 1) * self.share)

    def wanted_by(self, rank: int) -> np.ndarray:
        """int64 sample_ids of a consumer's rows."""
        return np.arange(rank, self.samples, self.workers)


class Source:
    """Data that a producer has computed: warm arrays [rows, tokens] by column."""

    def __init__(self, size: Size, rank: int) -> None:
        self.rows = size.made_by(rank)
        kept = max(1, min(size.share, _SOURCE_BYTES // (size.tokens * BYTES_PER_TOKEN)))
        self._first = int(self.rows[0])
        self._kept = kept
        self._arrays = {
            name: np.stack([row_of(size, rank * size.share + row, name) for row in range(kept)])
            for name in COLUMNS
        }

    def fill(self, name: str, into: np.ndarray) -> None:
        """Copy a column into memory of the same dtype, flat or [rows, tokens]."""
        source = self._arrays[name].reshape(-1)
        flat = into.reshape(-1)
        for start in range(0, len(flat), len(source)):
            part = flat[start : start + len(source)]
            part[:] = source[: len(part)]


def row_of(size: Size, sample: int, name: str) -> np.ndarray:
    """Make the content of row `sample` of a column."""
    kept = max(1, min(size.share, _SOURCE_BYTES // (size.tokens * BYTES_PER_TOKEN)))
    share, row = divmod(sample, size.share)
    seed = (share * size.share + row % kept) * 7919 + list(COLUMNS).index(name) * 104729
    return ((np.arange(size.tokens) + seed) % 251).astype(COLUMNS[name])


def check(size: Size, rows: np.ndarray, name: str, arrived: list[np.ndarray]) -> None:
    """Raise `RuntimeError` unless these are the rows of a column."""
    if len(rows) != len(arrived):
        raise RuntimeError(f"{len(arrived)} rows of {name} arrived, not {len(rows)}")
    for sample, array in zip(rows.tolist(), arrived, strict=True):
        if not np.array_equal(array, row_of(size, sample, name)):
            raise RuntimeError(f"row {sample} of {name} arrived with other values")


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


def _buffer(size: Size, dtype: np.dtype[Any]) -> np.ndarray:
    """Flat, faulted, for a share of a column, or for whole rows of it where that is too much."""
    most = max(1, _BUFFER_BYTES // len(COLUMNS) // (size.tokens * dtype.itemsize))
    return np.ones(min(size.share, most) * size.tokens, dtype)
