"""Places of the rows of a batch: columns of several stages joined by row, and such rows together.

`join` finds the bytes of every row of every column, as arrays, from manifests alone. A list
column's rows are found by summing the row lengths of its axis, so no reader ever needs the offsets
that the shard itself holds. An entry's ranges are checked against its rows and its file where
entries are made (`ShardEntry`). `Sources.concat` puts rows of several iterations together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from earl_core.dispatch.shards.manifest import TOKEN_AXIS, Manifest, ManifestError, ShardEntry

Kind = Literal["scalar", "list", "string"]


@dataclass(frozen=True, eq=False)
class ColumnSource:
    """One column of the rows, in their order.

    dtype: of its elements; strings are bytes of UTF-8. manifest: which manifest holds it,
    equal for columns that share `shard`. shard,
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

    @classmethod
    def concat(cls, parts: Sequence[Sources]) -> Sources:
        """The rows of all parts, one part after another; a shard of several counts once.

        Parts are what `join` and `take` return: of several manifests, or chosen rows of one. Their
        columns must be the same, of the same kinds and types; those of a part without rows do not
        count. Raises `ManifestError` where columns differ or a sample_id is in two parts,
        `ValueError` when there is no part.
        """
        if not parts:
            raise ValueError("a batch needs the rows of at least one part")
        filled = [part for part in parts if len(part.rows)] or parts[:1]
        if len(filled) == 1:
            return filled[0]
        _refuse_other_columns(filled)
        rows = _joined(part.rows for part in filled)
        _refuse_duplicates(np.sort(rows), "a batch of several parts")
        number: dict[tuple[str, str, int], int] = {}
        entries: list[ShardEntry] = []
        renumbered = []
        for part in filled:
            new = np.empty(len(part.entries), dtype=np.int64)
            for old, entry in enumerate(part.entries):
                known = number.setdefault((entry.host, entry.file, entry.generation), len(entries))
                if known == len(entries):
                    entries.append(entry)
                new[old] = known
            renumbered.append(new)
        tokens = _joined(part.tokens for part in filled)
        return cls(tuple(entries), rows, tokens, _columns_of_all(filled, renumbered))

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


def _refuse_other_columns(parts: Sequence[Sources]) -> None:
    """Raise `ManifestError` unless the columns of all parts are like those of the first."""
    first, *others = (
        {name: f"a {one.kind} of {one.dtype}" for name, one in part.columns.items()}
        for part in parts
    )
    for number, columns in enumerate(others, 2):
        name = min((name for name, _ in first.items() ^ columns.items()), default=None)
        if name is not None:
            have, has = first.get(name, "missing"), columns.get(name, "missing")
            raise ManifestError(
                f"column {name!r} of part {number} of the batch is {has}, and that of part 1 is "
                f"{have}: choose columns that all parts have alike"
            )


def _columns_of_all(
    parts: Sequence[Sources], renumbered: Sequence[np.ndarray]
) -> dict[str, ColumnSource]:
    """The columns of the parts, in order. renumbered: the new number of each shard of a part."""
    manifests: dict[tuple[int, ...], int] = {}
    shards: dict[int, np.ndarray] = {}
    columns = {}
    for name, column in parts[0].columns.items():
        pieces = [part.columns[name] for part in parts]
        # Columns that are of one manifest in each part share the array afterwards, too.
        one = manifests.setdefault(tuple(piece.manifest for piece in pieces), len(manifests))
        if one not in shards:
            shards[one] = _joined(
                new[piece.shard] for new, piece in zip(renumbered, pieces, strict=True)
            )
        columns[name] = replace(
            column,
            manifest=one,
            shard=shards[one],
            start=_joined(piece.start for piece in pieces),
            length=_joined(piece.length for piece in pieces),
        )
    return columns
