"""A batch: columns of several stages joined by row, read without copies.

Views are reachable only through the `Batch` that owns the leases. `close()` raises while a view
is alive, because the memory under it may be reused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from earl_core.dispatch.reads.sources import ColumnSource, Kind, Sources, join
from earl_core.dispatch.segments.leases import Mapped
from earl_core.dispatch.shards.manifest import Manifest
from earl_core.dispatch.shards.store import ShardStore


class Lease(Protocol):
    """Memory that a batch reads; `close` raises `BufferError` while views of it are alive."""

    def close(self) -> None: ...


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
        self._open(join(manifests, columns, rows), store, verify)

    @classmethod
    def of(cls, sources: Sources, store: ShardStore, verify: bool = False) -> Batch:
        """The rows of `sources`, whose shards lie on this host."""
        batch = cls.__new__(cls)
        batch._open(sources, store, verify)
        return batch

    @classmethod
    def over(
        cls, sources: Sources, memories: Mapping[int, memoryview], leases: Sequence[Lease]
    ) -> Batch:
        """A batch over memory that was brought here otherwise; it closes the leases, last first.

        memories: what `ColumnSource.shard` counts and `start` points into; their starts are
        multiples of 8.
        """
        batch = cls.__new__(cls)
        batch._hold(sources, memories, leases)
        return batch

    def _open(self, sources: Sources, store: ShardStore, verify: bool) -> None:
        mapped = open_shards(store, sources, sources.shards(), verify)
        memories = {number: one.memory for number, one in mapped.items()}
        self._hold(sources, memories, list(mapped.values()))

    def _hold(
        self, sources: Sources, memories: Mapping[int, memoryview], leases: Sequence[Lease]
    ) -> None:
        self.rows = sources.rows
        self._columns = dict(sources.columns)
        self._memories = dict(memories)
        self._leases = list(leases)
        self._arrays: dict[tuple[int, np.dtype], np.ndarray] = {}
        self._places: dict[str, list[tuple[np.ndarray, int, int]]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def names(self) -> list[str]:
        """Columns that can be read."""
        return sorted(self._columns)

    def row(self, name: str, index: int) -> np.ndarray:
        """Row `index` of a list column, as a read-only view."""
        buffer, start, stop = self._located(name, "list")[index]
        return buffer[start:stop]

    def list_rows(self, name: str) -> list[np.ndarray]:
        """Every row of a list column, each a read-only view."""
        return [buffer[start:stop] for buffer, start, stop in self._located(name, "list")]

    def scalars(self, name: str) -> np.ndarray:
        """A numeric scalar column for all rows (a small copy)."""
        column = self._of_kind(name, "scalar")
        out = np.empty(len(self), dtype=column.dtype)
        for number in np.unique(column.shard).tolist():
            chosen = column.shard == number
            elements = column.start[chosen] // column.dtype.itemsize
            out[chosen] = self._array(number, column.dtype)[elements]
        return out

    def strings(self, name: str) -> list[str]:
        """A string column for all rows (a copy)."""
        places = self._located(name, "string")
        return [buffer[start:stop].tobytes().decode() for buffer, start, stop in places]

    def _of_kind(self, name: str, kind: Kind) -> ColumnSource:
        column = self._columns.get(name)
        if column is None:
            raise ValueError(f"the batch has no column {name!r}: it has {self.names()}")
        if column.kind != kind:
            raise ValueError(f"{name!r} is a {column.kind} column; use {_WAYS[column.kind]}")
        return column

    def _located(self, name: str, kind: Kind) -> list[tuple[np.ndarray, int, int]]:
        """Array, first element and the element after the last of every row."""
        column = self._of_kind(name, kind)
        if name not in self._places:
            size = column.dtype.itemsize
            shards = column.shard.tolist()
            arrays = {number: self._array(number, column.dtype) for number in set(shards)}
            starts = (column.start // size).tolist()
            stops = ((column.start + column.length) // size).tolist()
            # Indexing numpy arrays one by one is slow.
            self._places[name] = [
                (arrays[number], start, stop)
                for number, start, stop in zip(shards, starts, stops, strict=True)
            ]
        return self._places[name]

    def _array(self, number: int, dtype: np.dtype) -> np.ndarray:
        """A whole memory as elements of one type."""
        known = self._arrays.get((number, dtype))
        if known is None:
            memory = self._memories[number]
            count = memory.nbytes // dtype.itemsize
            known = np.frombuffer(memory, dtype, count) if count else np.empty(0, dtype)
            self._arrays[number, dtype] = known
        return known

    def close(self) -> None:
        """Give the leases back. Raises `BufferError` while a view is still alive."""
        self._forget()
        while self._leases:
            self._leases[-1].close()
            self._leases.pop()

    def _forget(self) -> None:
        for held in (self._columns, self._places, self._arrays, self._memories):
            held.clear()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._forget()
            leases, self._leases = self._leases, []
            abandon(leases)


_WAYS: dict[Kind, str] = {
    "scalar": "scalars()",
    "list": "row() or list_rows()",
    "string": "strings()",
}


def open_shards(
    store: ShardStore, sources: Sources, numbers: Iterable[int], verify: bool
) -> dict[int, Mapped]:
    """Leases on shards of this host, by number; all or none. Raises as `ShardStore.open` does."""
    found: dict[int, Mapped] = {}
    try:
        for number in numbers:
            found[number] = store.open(sources.entries[number], verify=verify)
    except BaseException:
        abandon(found.values())
        raise
    return found


def abandon(leases: Iterable[Lease]) -> None:
    """Close leases on the way of an error, whose traceback may keep views alive."""
    for lease in reversed(list(leases)):
        with contextlib.suppress(BufferError):
            lease.close()
