"""A batch: columns of several stages joined by row, read without copies.

`join` finds the bytes of every row of every column, as arrays, from manifests alone. A list
column's rows are found by summing the row lengths of its axis, so no reader ever needs the offsets
that the shard itself holds. An entry's ranges are checked against its rows and its file where
entries are made (`ShardEntry`).

Views are reachable only through the `Batch` that owns the leases. `close()` raises while a view
is alive, because the memory under it may be reused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from earl_core.dispatch.segments.leases import Mapped
from earl_core.dispatch.shards.manifest import TOKEN_AXIS, Manifest, ManifestError, ShardEntry
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


Kind = Literal["scalar", "list", "string"]


@dataclass(frozen=True, eq=False)
class ColumnSource:
    """One column of the rows, in their order.

    dtype: of its elements; strings are bytes of UTF-8. manifest: which manifest holds it. shard,
    start, length: int64 per row, the shard's index in `Sources.entries` and the bytes of the row's
    values within its file.
    """

    kind: Kind
    dtype: np.dtype
    manifest: int
    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray


@dataclass(frozen=True, eq=False)
class Sources:
    """The rows of a batch and where their columns lie.

    entries: all shards, manifest after manifest, by (host, file) within one. rows: int64
    sample_ids. tokens: int64, tokens per row; zeros where no manifest counts them.
    """

    entries: tuple[ShardEntry, ...]
    rows: np.ndarray
    tokens: np.ndarray
    columns: dict[str, ColumnSource]

    def take(self, members: np.ndarray) -> Sources:
        """Some of the rows. members: int64 row numbers."""
        if np.array_equal(members, np.arange(len(self.rows))):
            return self
        # Columns of one manifest share the array, before and after.
        shards = {number: shard[members] for number, shard in self._shard_arrays().items()}
        columns = {
            name: replace(
                column,
                shard=shards[id(column.shard)],
                start=column.start[members],
                length=column.length[members],
            )
            for name, column in self.columns.items()
        }
        return Sources(self.entries, self.rows[members], self.tokens[members], columns)

    def only(self, *names: str) -> Sources:
        """Some of the columns."""
        return replace(self, columns={name: self.columns[name] for name in names})

    def shards(self) -> list[int]:
        """Numbers of the shards that hold a column of a row, ascending."""
        arrays = self._shard_arrays().values()
        return sorted({number for shard in arrays for number in np.unique(shard).tolist()})

    def _shard_arrays(self) -> dict[int, np.ndarray]:
        return {id(column.shard): column.shard for column in self.columns.values()}


def sample_ids(manifest: Manifest) -> np.ndarray:
    """int64 sample_ids of a manifest's rows, ascending. Raises `ManifestError` on duplicates."""
    rows = np.sort(_joined(entry.ids for entry in manifest.shards))
    _refuse_duplicates(rows, _named(manifest))
    return rows


def join(
    manifests: Sequence[Manifest],
    columns: Sequence[str] | None = None,
    rows: Iterable[int] | None = None,
) -> Sources:
    """Join manifests by sample_id; a column of several comes from the first that has it.

    rows: the sample_ids wanted, in any order; None for those of the last manifest, ascending, so
    that a later stage that kept fewer decides. Raises `ManifestError` when a manifest contradicts
    itself, lacks a row or has one twice, `ValueError` when a wanted column is nowhere.
    """
    if not manifests:
        raise ValueError("a batch needs at least one manifest")
    wanted = sample_ids(manifests[-1]) if rows is None else np.fromiter(rows, dtype=np.int64)
    if rows is not None:
        _refuse_duplicates(np.sort(wanted), "the rows of a batch")
    entries: list[ShardEntry] = []
    found: dict[str, ColumnSource] = {}
    tokens: np.ndarray | None = None
    for number, manifest in enumerate(manifests):
        table = _Table(manifest, number, wanted, len(entries))
        entries += table.entries
        if tokens is None and all(TOKEN_AXIS in entry.axes for entry in table.entries):
            tokens = table.axis(TOKEN_AXIS)[0]
        for name in sorted(manifest.column_names() - set(found)):
            if columns is None or name in columns:
                found[name] = table.column(name)
    missing = sorted(set(columns or ()) - set(found))
    if missing:
        raise ValueError(
            f"no manifest has the columns {missing}: the stages "
            f"{[manifest.stage for manifest in manifests]} wrote others"
        )
    if tokens is None:
        tokens = np.zeros(len(wanted), dtype=np.int64)
    return Sources(tuple(entries), wanted, tokens, found)


class _Table:
    """One manifest's shards, and where the wanted rows stand in them. before: shards of others."""

    def __init__(self, manifest: Manifest, number: int, rows: np.ndarray, before: int) -> None:
        self.entries = sorted(manifest.shards, key=lambda entry: (entry.host, entry.file))
        self._number = number
        self._what = _named(manifest)
        counts = np.array([entry.rows for entry in self.entries], dtype=np.int64)
        ids = _joined(entry.ids for entry in self.entries)
        self._first = np.cumsum(counts) - counts
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        _refuse_duplicates(ordered, self._what)
        places = np.searchsorted(ordered, rows)
        if len(rows) and (
            len(ids) == 0 or (ordered[np.minimum(places, len(ids) - 1)] != rows).any()
        ):
            raise ManifestError(f"{self._what} lacks rows that a later stage has")
        self._flat = order[places] if len(rows) else np.empty(0, dtype=np.int64)
        """Number of each wanted row among all rows of all shards."""
        self._local = np.repeat(np.arange(len(self.entries)), counts)[self._flat]
        """Shard of each wanted row, counted within this manifest."""
        self._shard = self._local + before
        self._axes: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def column(self, name: str) -> ColumnSource:
        """The bytes of one column for the wanted rows."""
        ranges = [entry.columns[name] for entry in self.entries]
        kinds = {(column.dtype, column.axis) for column in ranges}
        if len(kinds) != 1:
            raise ManifestError(f"{self._what} has column {name!r} in different types: {kinds}")
        text, axis = kinds.pop()
        dtype = np.dtype("uint8" if text == "string" else text)
        begins = np.array([column.values[0] for column in ranges], dtype=np.int64)
        kind: Kind = "string" if text == "string" else "list"
        if axis is None:
            kind = "scalar"
            elements = np.ones(len(self._flat), dtype=np.int64)
            before = self._flat - self._first[self._local]
        else:
            elements, before = self.axis(axis)
        return ColumnSource(
            kind=kind,
            dtype=dtype,
            manifest=self._number,
            shard=self._shard,
            start=begins[self._local] + before * dtype.itemsize,
            length=elements * dtype.itemsize,
        )

    def axis(self, axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Elements of each wanted row, and elements before it in its shard; int64."""
        if axis not in self._axes:
            every = _joined(entry.lengths[axis] for entry in self.entries)
            sums = np.concatenate([[0], np.cumsum(every)])
            before = sums[self._flat] - sums[self._first][self._local]
            self._axes[axis] = (every[self._flat], before)
        return self._axes[axis]


def _named(manifest: Manifest) -> str:
    return f"the {manifest.stage} manifest of iteration {manifest.iteration}"


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _refuse_duplicates(ordered: np.ndarray, what: str) -> None:
    if (ordered[1:] == ordered[:-1]).any():
        raise ManifestError(f"{what} has a sample_id twice")
