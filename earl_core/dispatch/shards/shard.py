"""A shard being written: the producer fills its columns in place, then publishes it."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import pyarrow as pa

from earl_core.dispatch.segments.segment import Segment
from earl_core.dispatch.shards.checksums import BLOCK_BYTES, fill_table, in_background, table_bytes
from earl_core.dispatch.shards.manifest import ColumnRange, ManifestError, ShardEntry, Span
from earl_core.dispatch.shards.skeleton import END_OF_STREAM, Skeleton
from earl_core.system.processes import host_name

_ROW_IDS = "sample_id"


class ShardWriter:
    """Writable views into a shard that no reader sees before `seal`.

    Values are undefined until they are written, because the memory was used before: write every
    one. As a context manager the shard is abandoned at the end unless it was sealed.
    """

    def __init__(
        self,
        segment: Segment,
        skeleton: Skeleton,
        name: str,
        strings: Mapping[str, Sequence[bytes]],
    ) -> None:
        self._segment = segment
        self._skeleton = skeleton
        self._name = name
        self._memory = segment.memory
        self._offsets: dict[str, np.ndarray] = {}
        self._table = skeleton.table(segment.size, table_bytes(skeleton.body[1]))
        self._lay_out(strings)

    def _lay_out(self, strings: Mapping[str, Sequence[bytes]]) -> None:
        """Write all but the values; padding is zero, so that checksums depend on data alone."""
        skeleton, memory = self._skeleton, self._memory
        memory[: len(skeleton.prefix)] = skeleton.prefix
        end = skeleton.body_end
        memory[end : end + len(END_OF_STREAM)] = END_OF_STREAM
        memory[len(memory) - len(skeleton.footer) :] = skeleton.footer
        spans: list[Span] = []
        for column in skeleton.columns.values():
            spans += [column.offsets] if column.offsets is not None else []
            spans.append(column.values)
            if column.offsets is not None:
                offsets = self._array("int64", column.offsets)
                offsets[:] = self._axis_offsets(column)
        for name, parts in strings.items():
            start, length = skeleton.columns[name].values
            memory[start : start + length] = b"".join(parts)
        ends = [*(start for start, _ in spans[1:]), end]
        for (start, length), stop in zip(spans, ends, strict=True):
            memory[start + length : stop] = bytes(stop - start - length)

    def _axis_offsets(self, column: ColumnRange) -> np.ndarray:
        """int64 [rows + 1]: the first element of each row, and the number of all elements."""
        axis = column.axis
        if axis is None:
            return np.arange(self._skeleton.rows + 1, dtype=np.int64)
        if axis not in self._offsets:
            offsets = np.zeros(self._skeleton.rows + 1, dtype=np.int64)
            np.cumsum(self._skeleton.axes[axis], out=offsets[1:])
            self._offsets[axis] = offsets
        return self._offsets[axis]

    def _array(self, dtype: str, span: Span) -> np.ndarray:
        kind = np.dtype(dtype)
        count = span[1] // kind.itemsize
        # Raises once the segment is not ours any more.
        memory = self._segment.memory
        return np.frombuffer(memory, dtype=kind, count=count, offset=span[0])

    def _column(self, name: str) -> ColumnRange:
        column = self._skeleton.columns.get(name)
        if column is None or column.dtype == "string":
            numeric = [n for n, c in self._skeleton.columns.items() if c.dtype != "string"]
            raise ValueError(f"{name!r} is no numeric column of this shard: it has {numeric}")
        return column

    def values(self, name: str) -> np.ndarray:
        """A scalar column [rows], or all elements of a list column row after row; writable."""
        column = self._column(name)
        return self._array(column.dtype, column.values)

    def rows(self, name: str) -> list[np.ndarray]:
        """The elements of each row of a list column; writable."""
        column = self._column(name)
        if column.axis is None:
            raise ValueError(f"{name!r} is not a list column; use values()")
        values = self._array(column.dtype, column.values)
        bounds = self._axis_offsets(column).tolist()
        return [values[a:b] for a, b in itertools.pairwise(bounds)]

    def seal(self) -> ShardEntry:
        """Publish the shard: readers see it at once. The entry's checksum is pending.

        Drop all views before; what is written through one afterwards damages the shard. Raises
        `ValueError` when `sample_id` does not ascend.
        """
        ids = self.values(_ROW_IDS).tolist()
        if any(b <= a for a, b in itertools.pairwise(ids)):
            raise ValueError(f"sort the rows by {_ROW_IDS}, and give each its own")
        entry = ShardEntry(
            host=host_name(),
            file=self._name,
            bytes=self._segment.size,
            generation=self._segment.generation,
            rows=self._skeleton.rows,
            row_ids=tuple(ids),
            axes={axis: tuple(n.tolist()) for axis, n in self._skeleton.axes.items()},
            columns=self._skeleton.columns,
            body=self._skeleton.body,
            checksums=self._table,
            block_bytes=BLOCK_BYTES,
            checksum="",
        )
        # Taken before anybody can release the shard: the table is written into it, and the
        # segment must not be recycled meanwhile.
        lease = os.open(self._segment.path, os.O_RDONLY)
        try:
            fcntl.flock(lease, fcntl.LOCK_SH)
            self._segment.seal(self._name)
            entry._pending = self._checksum_later(lease, entry.layout)
        except BaseException:
            os.close(lease)
            raise
        return entry

    def _checksum_later(self, lease: int, layout: int) -> Future[str]:
        memory, body, table = self._memory, self._skeleton.body, self._table

        def job() -> str:
            try:
                return fill_table(memory, body, table, layout)
            finally:
                # Said, not left to closing: a child forked meanwhile has the descriptor too.
                fcntl.flock(lease, fcntl.LOCK_UN)
                os.close(lease)

        return in_background(job)

    def abandon(self) -> None:
        """Give the memory back; nothing happens to a shard that was sealed."""
        self._segment.abandon()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()


def open_batch(source: pa.NativeFile, name: str) -> pa.RecordBatch:
    """The record batch of a shard's file, without copies.

    All offsets are looked at first: reading by one that lies outside ends the process. Raises
    `ManifestError` for what is no Arrow IPC file, or is damaged.
    """
    try:
        batch = pa.ipc.open_file(source).get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ManifestError(f"{name} is not an Arrow IPC file, or is damaged: {reason}") from error
    return batch
