"""A batch: columns of several stages joined by row, read without copies.

Views are reachable only through the `Batch` that owns the leases. `close()` raises while a view
is alive, because the memory under it may be reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from types import TracebackType

import numpy as np

from earl_core.dispatch.manifest import Manifest, ManifestError, ShardEntry
from earl_core.dispatch.store import ShardStore


class _Mapping:
    """A shard mapped read-only under a shared lease."""

    def __init__(self, store: ShardStore, entry: ShardEntry, verify: bool) -> None:
        path = store.path(entry)
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ManifestError(f"the shard {path} is gone") from error
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        try:
            # The lease comes first: a collector may have unlinked the file in between.
            store.verify(entry, checksum=verify)
            self.memory = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.entry = entry

    def array(self, dtype: str, span: tuple[int, int]) -> np.ndarray:
        kind = np.dtype(dtype)
        start, length = span
        if start < 0 or start + length > self.entry.bytes:
            raise ManifestError(f"the manifest's range {span} lies outside of {self.entry.file}")
        return np.frombuffer(self.memory, dtype=kind, count=length // kind.itemsize, offset=start)

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


class Batch:
    """Rows of one or more manifests, joined by `sample_id`.

    `rows` defaults to the rows of the last manifest given, so that a later stage that kept fewer
    samples decides. Raises `ManifestError` when a shard is missing or damaged.
    """

    def __init__(
        self,
        store: ShardStore,
        manifests: Sequence[Manifest],
        rows: Iterable[int] | None = None,
        verify: bool = False,
    ) -> None:
        self._mappings: list[_Mapping] = []
        self._columns: dict[str, list[tuple[_Mapping, np.ndarray, np.ndarray | None]]] = {}
        self._index: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        wanted = rows if rows is not None else row_ids(manifests[-1])
        self.rows = np.asarray(list(wanted), dtype=np.int64)
        try:
            for manifest in manifests:
                self._add(store, manifest, verify)
        except BaseException:
            self._abandon()
            raise

    def _add(self, store: ShardStore, manifest: Manifest, verify: bool) -> None:
        mappings = [_Mapping(store, entry, verify) for entry in manifest.shards]
        self._mappings.extend(mappings)
        shard_of, row_of = _locate(manifest, self.rows)
        for name in sorted(manifest.column_names()):
            if name in self._columns:
                continue
            parts = []
            for mapping in mappings:
                column = mapping.entry.columns[name]
                kind = "uint8" if column.dtype == "string" else column.dtype
                offsets = mapping.array("int64", column.offsets) if column.offsets else None
                parts.append((mapping, mapping.array(kind, column.values), offsets))
            self._columns[name] = parts
            self._index[name] = (shard_of, row_of)

    def __len__(self) -> int:
        return len(self.rows)

    def names(self) -> list[str]:
        """Columns that can be read."""
        return sorted(self._columns)

    def row(self, name: str, index: int) -> np.ndarray:
        """Row `index` of a list column, as a read-only view into shared memory."""
        shard, row = (int(part[index]) for part in self._index[name])
        _, values, offsets = self._columns[name][shard]
        if offsets is None:
            raise ValueError(f"{name!r} is not a list column; use scalars()")
        return values[offsets[row] : offsets[row + 1]]

    def list_rows(self, name: str) -> list[np.ndarray]:
        """Every row of a list column, each a read-only view."""
        return [self.row(name, index) for index in range(len(self))]

    def scalars(self, name: str) -> np.ndarray:
        """A numeric scalar column for all rows (a small copy)."""
        shard_of, row_of = self._index[name]
        parts = self._columns[name]
        if any(offsets is not None for _, _, offsets in parts):
            raise ValueError(f"{name!r} is a list column; use row() or list_rows()")
        out = np.empty(len(self), dtype=parts[0][1].dtype if parts else np.int64)
        for shard, (_, values, _) in enumerate(parts):
            chosen = shard_of == shard
            out[chosen] = values[row_of[chosen]]
        return out

    def close(self) -> None:
        """Give the leases back. Raises `BufferError` while a view is still alive."""
        self._columns.clear()
        while self._mappings:
            self._mappings[-1].close()
            self._mappings.pop()

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
        with contextlib.suppress(BufferError):
            self.close()


def row_ids(manifest: Manifest) -> list[int]:
    """sample_id of every row of a manifest, ascending over its shards."""
    return sorted(row for entry in manifest.shards for row in entry.row_ids)


def _locate(manifest: Manifest, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shard number and row number of each wanted sample_id."""
    ids = np.array([row for entry in manifest.shards for row in entry.row_ids], dtype=np.int64)
    shards = np.repeat(np.arange(len(manifest.shards)), [entry.rows for entry in manifest.shards])
    numbers = np.concatenate([np.arange(entry.rows) for entry in manifest.shards] or [ids])
    order = np.argsort(ids, kind="stable")
    places = np.searchsorted(ids[order], rows)
    if len(rows) and (
        len(ids) == 0 or (ids[order][np.minimum(places, len(ids) - 1)] != rows).any()
    ):
        raise ManifestError(
            f"the {manifest.stage} manifest of iteration {manifest.iteration} lacks rows that a "
            "later stage has"
        )
    return shards[order][places], numbers[order][places]
