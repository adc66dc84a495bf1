"""A batch: columns of several stages joined by row, read without copies.

Views are reachable only through the `Batch` that owns the leases. `close()` raises while a view
is alive, because the memory under it may be reused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Literal, Protocol

import numpy as np

from earl_core.dispatch.reads.sources import integers, refuse_duplicates
from earl_core.dispatch.shards.manifest import ColumnRange, Manifest, ManifestError, ShardEntry
from earl_core.dispatch.shards.store import ShardStore

Kind = Literal["scalar", "list", "string"]


class Lease(Protocol):
    """Memory that a batch reads; `close` raises `BufferError` while views of it are alive."""

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Located:
    """Where one column lies, for the rows of a batch in their order.

    buffers: flat read-only arrays of the column's dtype, uint8 for strings. buffer: int32 per row,
    which of them holds it. start, stop: int64 per row, in elements of that buffer.
    """

    buffers: tuple[np.ndarray, ...]
    buffer: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    kind: Kind = "list"

    @cached_property
    def places(self) -> list[tuple[np.ndarray, int, int]]:
        """Buffer, start and stop of every row; indexing numpy arrays one by one is slow."""
        rows = zip(self.buffer.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        return [(self.buffers[number], start, stop) for number, start, stop in rows]


class Batch:
    """Rows of one or more manifests, joined by `sample_id`.

    `rows` defaults to the rows of the last manifest given, so that a later stage that kept fewer
    samples decides. `columns` limits what is read; a column of several manifests comes from the
    first. With `verify` the shards' bytes are checked. Raises `ManifestError` when a shard is
    missing or damaged or has not all rows, or a sample_id is there twice, `ValueError` when no
    manifest has a wanted column.
    """

    def __init__(
        self,
        store: ShardStore,
        manifests: Sequence[Manifest],
        rows: Iterable[int] | None = None,
        verify: bool = False,
        columns: Sequence[str] | None = None,
    ) -> None:
        wanted = rows if rows is not None else row_ids(manifests[-1])
        self.rows = integers(wanted)
        if len(np.unique(self.rows)) < len(self.rows):
            raise ManifestError("the rows of a batch name a sample_id twice")
        self._columns: dict[str, Located] = {}
        self._leases: list[Lease] = []
        try:
            for manifest in manifests:
                self._add(store, manifest, verify, columns)
            missing = sorted(set(columns or ()) - set(self._columns))
            if missing:
                raise ValueError(
                    f"no manifest has the columns {missing}: the stages "
                    f"{[manifest.stage for manifest in manifests]} wrote others"
                )
        except BaseException:
            self._abandon()
            raise

    @classmethod
    def from_located(
        cls, rows: np.ndarray, columns: Mapping[str, Located], leases: Sequence[Lease]
    ) -> Batch:
        """A batch over memory that was brought here otherwise; it closes the leases, last first.

        rows: int64 sample_ids.
        """
        batch = cls.__new__(cls)
        batch.rows = rows
        batch._columns = dict(columns)
        batch._leases = list(leases)
        return batch

    def _add(
        self, store: ShardStore, manifest: Manifest, verify: bool, columns: Sequence[str] | None
    ) -> None:
        new = manifest.column_names() - set(self._columns)
        names = sorted(new if columns is None else new & set(columns))
        shard_of, row_of = _locate(manifest, self.rows)
        if not names:
            return
        # Shards without a wanted row are not opened: they may lie on other hosts.
        needed = np.unique(shard_of)
        place = np.searchsorted(needed, shard_of).astype(np.int32)
        entries = [manifest.shards[number] for number in needed.tolist()]
        memories = []
        for entry in entries:
            lease = store.open(entry, verify=verify)
            self._leases.append(lease)
            memories.append(lease.memory)
        for name in names:
            example = manifest.shards[0].columns[name]
            self._columns[name] = _located(name, example, entries, memories, place, row_of)

    def __len__(self) -> int:
        return len(self.rows)

    def names(self) -> list[str]:
        """Columns that can be read."""
        return sorted(self._columns)

    def located(self, name: str) -> Located:
        """Where a column lies; its buffers are views, and must go before the batch is closed."""
        column = self._columns.get(name)
        if column is None:
            raise ValueError(f"the batch has no column {name!r}: it has {self.names()}")
        return column

    def _of_kind(self, name: str, kind: Kind, use: str) -> Located:
        column = self.located(name)
        if column.kind != kind:
            raise ValueError(f"{name!r} is a {column.kind} column; use {use}")
        return column

    def row(
        self, name: str, index: int, start: int | None = None, stop: int | None = None
    ) -> np.ndarray:
        """Row `index` of a list column, as a read-only view; `start:stop` cuts it as a slice."""
        column = self._of_kind(name, "list", _OTHER_WAYS)
        buffer, first, end = column.places[index]
        view = buffer[first:end]
        return view if start is None and stop is None else view[start:stop]

    def list_rows(self, name: str) -> list[np.ndarray]:
        """Every row of a list column, each a read-only view."""
        column = self._of_kind(name, "list", _OTHER_WAYS)
        return [buffer[start:stop] for buffer, start, stop in column.places]

    def scalars(self, name: str) -> np.ndarray:
        """A numeric scalar column for all rows (a small copy)."""
        column = self._of_kind(name, "scalar", "row(), list_rows() or strings()")
        # A batch without rows may have no buffer either.
        dtype = column.buffers[0].dtype if column.buffers else np.dtype(np.int64)
        out = np.empty(len(self), dtype=dtype)
        for number, buffer in enumerate(column.buffers):
            chosen = column.buffer == number
            out[chosen] = buffer[column.start[chosen]]
        return out

    def strings(self, name: str) -> list[str]:
        """A string column for all rows (a copy)."""
        column = self._of_kind(name, "string", "scalars(), row() or list_rows()")
        return [buffer[start:stop].tobytes().decode() for buffer, start, stop in column.places]

    def close(self) -> None:
        """Give the leases back. Raises `BufferError` while a view is still alive."""
        self._columns.clear()
        while self._leases:
            self._leases[-1].close()
            self._leases.pop()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Close on the way of an error, whose traceback may keep views alive."""
        self._columns.clear()
        leases, self._leases = self._leases, []
        for lease in reversed(leases):
            with contextlib.suppress(BufferError):
                lease.close()


_OTHER_WAYS = "scalars() or strings()"


def row_ids(manifest: Manifest) -> list[int]:
    """sample_id of every row of a manifest, ascending over its shards."""
    return sorted(row for entry in manifest.shards for row in entry.row_ids)


def _located(
    name: str,
    example: ColumnRange,
    entries: Sequence[ShardEntry],
    memories: Sequence[memoryview],
    place: np.ndarray,
    row_of: np.ndarray,
) -> Located:
    """One column: `place` is the shard of each row among `entries`, `row_of` its number there."""
    dtype = np.dtype("uint8" if example.dtype == "string" else example.dtype)
    kind: Kind = "scalar" if example.axis is None else "list"
    kind = "string" if example.dtype == "string" else kind
    buffers = []
    starts, stops = np.empty(len(place), np.int64), np.empty(len(place), np.int64)
    for number, (entry, memory) in enumerate(zip(entries, memories, strict=True)):
        column = entry.columns[name]
        if column.dtype != example.dtype or (column.axis is None) != (example.axis is None):
            raise ManifestError(f"the shards have column {name!r} in different types")
        start, length = column.values
        count = length // dtype.itemsize
        buffers.append(np.frombuffer(memory, dtype=dtype, count=count, offset=start))
        chosen = place == number
        rows = row_of[chosen]
        if column.axis is None:
            starts[chosen], stops[chosen] = rows, rows + 1
        else:
            # From the manifest, which was checked, not from the offsets in shared memory.
            bounds = np.concatenate([[0], np.cumsum(entry.axes[column.axis], dtype=np.int64)])
            starts[chosen], stops[chosen] = bounds[rows], bounds[rows + 1]
    return Located(tuple(buffers) or (np.empty(0, dtype),), place, starts, stops, kind)


def _locate(manifest: Manifest, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shard number and row number of each wanted sample_id."""
    ids = integers(row for entry in manifest.shards for row in entry.row_ids)
    shards = np.repeat(np.arange(len(manifest.shards)), [entry.rows for entry in manifest.shards])
    numbers = np.concatenate([np.arange(entry.rows) for entry in manifest.shards] or [ids])
    order = np.argsort(ids, kind="stable")
    what = f"the {manifest.stage} manifest of iteration {manifest.iteration}"
    refuse_duplicates(ids[order], what)
    places = np.searchsorted(ids[order], rows)
    if len(rows) and (
        len(ids) == 0 or (ids[order][np.minimum(places, len(ids) - 1)] != rows).any()
    ):
        raise ManifestError(f"{what} lacks rows that a later stage has")
    return shards[order][places], numbers[order][places]
