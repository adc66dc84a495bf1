"""Where every row's bytes lie: the joined columns of several manifests, as arrays.

Works from manifests alone. A list column's rows are found by summing the row lengths of its
axis, so no reader ever needs the offsets that the shard itself holds. That an entry's ranges fit
its rows and its file is checked where entries are made (`ShardEntry`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from earl_core.dispatch.shards.manifest import TOKEN_AXIS, Manifest, ManifestError, ShardEntry


@dataclass(frozen=True, eq=False)
class ColumnSource:
    """One column of the rows, in their order.

    dtype: the manifest's name of it; itemsize: bytes of an element (1 for strings); per_token:
    each row has one element per token, so that context-parallel ranks share it out; manifest:
    which manifest holds it. shard, start, length: int64 per row, the shard's index in
    `Sources.entries` and the bytes of the row's values within its file.
    """

    dtype: str
    itemsize: int
    per_token: bool
    manifest: int
    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray


@dataclass(frozen=True, eq=False)
class Sources:
    """The rows of a batch and where their columns lie.

    entries: all shards, manifest after manifest, by (host, file) within one. rows: int64
    sample_ids, ascending. tokens: int64, tokens per row; zeros where no column is a list.
    """

    entries: tuple[ShardEntry, ...]
    rows: np.ndarray
    tokens: np.ndarray
    columns: dict[str, ColumnSource]


def batch_rows(manifest: Manifest) -> np.ndarray:
    """int64 sample_ids of a manifest's rows, ascending. Raises `ManifestError` on duplicates."""
    rows = np.sort(integers(chain.from_iterable(entry.row_ids for entry in manifest.shards)))
    refuse_duplicates(rows, f"the {manifest.stage} manifest of iteration {manifest.iteration}")
    return rows


def join(manifests: Sequence[Manifest], columns: Sequence[str] | None = None) -> Sources:
    """Join manifests by sample_id; a column of several comes from the first that has it.

    The rows of the last manifest decide. Raises `ManifestError` when a manifest contradicts
    itself or lacks rows of the last, `ValueError` when a wanted column is nowhere.
    """
    if not manifests:
        raise ValueError("a batch needs at least one manifest")
    rows = batch_rows(manifests[-1])
    tables: list[_Table] = []
    for manifest in manifests:
        tables.append(_Table(manifest, rows, sum(len(table.entries) for table in tables)))
    tokens = _tokens(tables, len(rows))
    found: dict[str, ColumnSource] = {}
    for number, table in enumerate(tables):
        token_axis = table.token_axis()
        if token_axis is not None and not np.array_equal(table.lengths(token_axis), tokens):
            token_axis = None
        for name in sorted(table.names):
            if name not in found and (columns is None or name in columns):
                found[name] = table.column(name, number, token_axis)
    missing = sorted(set(columns or ()) - set(found))
    if missing:
        raise ValueError(
            f"no manifest has the columns {missing}: the stages "
            f"{[manifest.stage for manifest in manifests]} wrote others"
        )
    entries = tuple(entry for table in tables for entry in table.entries)
    return Sources(entries, rows, tokens, found)


def _tokens(tables: Sequence[_Table], rows: int) -> np.ndarray:
    with_lists = [table for table in tables if table.token_axis() is not None]
    named = [table for table in with_lists if table.token_axis() == TOKEN_AXIS]
    for table in named or with_lists:
        axis = table.token_axis()
        assert axis is not None
        return table.lengths(axis)
    return np.zeros(rows, dtype=np.int64)


class _Table:
    """One manifest's shards, and where the wanted rows stand in them."""

    def __init__(self, manifest: Manifest, rows: np.ndarray, base: int) -> None:
        self.entries = sorted(manifest.shards, key=lambda entry: (entry.host, entry.file))
        self.names = manifest.column_names()
        self._what = f"the {manifest.stage} manifest of iteration {manifest.iteration}"
        counts = integers(entry.rows for entry in self.entries)
        ids = integers(chain.from_iterable(entry.row_ids for entry in self.entries))
        self._first = np.cumsum(counts) - counts
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        refuse_duplicates(ordered, self._what)
        places = np.searchsorted(ordered, rows)
        if len(rows) and (
            len(ids) == 0 or (ordered[np.minimum(places, len(ids) - 1)] != rows).any()
        ):
            raise ManifestError(f"{self._what} lacks rows that a later stage has")
        self._flat = order[places] if len(rows) else np.empty(0, dtype=np.int64)
        """Number of each wanted row among all rows of all shards."""
        self._local = np.repeat(np.arange(len(self.entries)), counts)[self._flat]
        """Shard of each wanted row, counted within this manifest."""
        self._shard = self._local + base
        self._axes: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def token_axis(self) -> str | None:
        """The axis that counts tokens: the one of that name, else the first that is no string's."""
        if not self.entries:
            return None
        entry = self.entries[0]
        if TOKEN_AXIS in entry.axes:
            return TOKEN_AXIS
        strings = {c.axis for c in entry.columns.values() if c.dtype == "string"}
        return next((axis for axis in entry.axes if axis not in strings), None)

    def lengths(self, axis: str) -> np.ndarray:
        """int64: elements of each wanted row along an axis."""
        return self._axis(axis)[0]

    def column(self, name: str, manifest: int, token_axis: str | None) -> ColumnSource:
        """The bytes of one column for the wanted rows."""
        ranges = [entry.columns[name] for entry in self.entries]
        kinds = {(column.dtype, column.axis) for column in ranges}
        if len(kinds) != 1:
            raise ManifestError(f"{self._what} has column {name!r} in different types: {kinds}")
        dtype, axis = kinds.pop()
        itemsize = ranges[0].itemsize
        begins = integers(column.values[0] for column in ranges)
        if axis is None:
            elements = np.ones(len(self._flat), dtype=np.int64)
            before = self._flat - self._first[self._local]
        else:
            elements, before = self._axis(axis)
        return ColumnSource(
            dtype=dtype,
            itemsize=itemsize,
            per_token=axis is not None and axis == token_axis,
            manifest=manifest,
            shard=self._shard,
            start=begins[self._local] + before * itemsize,
            length=elements * itemsize,
        )

    def _axis(self, axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Elements of each wanted row, and elements before it in its shard; int64."""
        if axis not in self._axes:
            try:
                every = integers(chain.from_iterable(e.axes[axis] for e in self.entries))
            except KeyError as error:
                raise ManifestError(f"{self._what} lacks the row lengths of {axis!r}") from error
            sums = np.concatenate([[0], np.cumsum(every)])
            before = sums[self._flat] - sums[self._first][self._local]
            self._axes[axis] = (every[self._flat], before)
        return self._axes[axis]


def refuse_duplicates(ordered: np.ndarray, what: str) -> None:
    """Raise `ManifestError` when sorted sample_ids hold one twice."""
    if (ordered[1:] == ordered[:-1]).any():
        raise ManifestError(f"{what} has a sample_id twice")


def integers(values: Iterable[int]) -> np.ndarray:
    """int64 array of numbers that a manifest holds. Raises `ManifestError` beyond 64 bits."""
    try:
        return np.fromiter(values, dtype=np.int64)
    except OverflowError as error:
        raise ManifestError("a manifest holds a number beyond 64 bits") from error
