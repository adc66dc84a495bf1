"""A shard being written: the producer fills its columns in place, then publishes it; its checksums.

There is one checksum for each block of the body, so that any range can be verified alone. The block
table lies in the shard itself, in the gap between the body and the footer: one uint64 for the
layout (`ShardEntry.layout`), then one xxh3_64 for each `BLOCK_BYTES` of the body, the last block
shorter. The manifest holds the xxh3_64 of the table. So the manifest vouches for the bytes, and the
shard for what the manifest says of its rows, lengths and columns. Both depend on the data alone,
wherever and whenever it was written. A table is filled by a thread of the producer after the shard
was published, off the hot path; the entry's checksum is empty until then.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import xxhash

from earl_core.dispatch.segments.segment import Segment
from earl_core.dispatch.shards.manifest import ColumnRange, ManifestError, ShardEntry, Span
from earl_core.dispatch.shards.skeleton import END_OF_STREAM, Skeleton, axis_name, make_skeleton
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
                offsets[:] = self._axis_namefsets(column)
        for name, parts in strings.items():
            start, length = skeleton.columns[name].values
            memory[start : start + length] = b"".join(parts)
        ends = [*(start for start, _ in spans[1:]), end]
        for (start, length), stop in zip(spans, ends, strict=True):
            memory[start + length : stop] = bytes(stop - start - length)

    def _axis_namefsets(self, column: ColumnRange) -> np.ndarray:
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
        bounds = self._axis_namefsets(column).tolist()
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


BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Proof:
    """The part of a manifest by which a shard's bytes are checked.

    body and checksums: start and length in bytes. checksum: xxh3_64 of the block table, in hex.
    layout: what the table says of rows, lengths and columns.
    """

    file: str
    generation: int
    bytes: int
    body: tuple[int, int]
    checksums: tuple[int, int]
    block_bytes: int
    checksum: str
    layout: int

    @classmethod
    def of(cls, entry: ShardEntry) -> Proof:
        """The proof of a manifest's entry. Raises `ManifestError` while the checksum is pending."""
        if not entry.checksum:
            raise ManifestError(
                f"the shard {entry.file} has no checksum yet, so its bytes cannot be proved to "
                "another host: seal the manifest before other hosts read it"
            )
        return cls(**{field.name: getattr(entry, field.name) for field in fields(cls)})


Checksummed = ShardEntry | Proof
"""A description of a shard that suffices to verify it."""


def table_bytes(body_length: int) -> int:
    """Size of the block table of a body."""
    return 8 * (1 - (-body_length // BLOCK_BYTES))


def fill_table(memory: memoryview, body: Span, table: Span, layout: int) -> str:
    """Compute the block table of a body and write it; returns its checksum in hex."""
    start, length = body
    sums = np.frombuffer(memory, dtype="<u8", count=table[1] // 8, offset=table[0])
    sums[0] = layout
    for block in range(len(sums) - 1):
        first = start + block * BLOCK_BYTES
        stop = min(first + BLOCK_BYTES, start + length)
        sums[1 + block] = xxhash.xxh3_64_intdigest(memory[first:stop])
    return _table_checksum(memory, table)


def blocks_of(entry: Checksummed, spans: Iterable[Span]) -> list[int]:
    """Numbers of the blocks of the body that these bytes of the file touch, ascending."""
    base, size = entry.body[0], entry.block_bytes
    numbers: set[int] = set()
    for start, length in spans:
        if length:
            numbers.update(range((start - base) // size, (start + length - 1 - base) // size + 1))
    return sorted(numbers)


def verify_blocks(memory: memoryview, entry: Checksummed, spans: Sequence[Span]) -> None:
    """Check the blocks that cover these bytes of a shard's file, each once.

    `memory` is the whole file. Raises `ManifestError` when table or blocks do not match, for a
    range outside of the body, or while the entry's checksum is pending.
    """
    first, size = entry.body
    if not entry.checksum:
        raise ManifestError(f"the checksum of {entry.file} is pending, so nothing can be verified")
    if len(memory) != entry.bytes:
        raise ManifestError(f"{entry.file} has {len(memory)} bytes, not {entry.bytes}")
    for start, length in spans:
        if start < first or length < 0 or start + length > first + size:
            raise ManifestError(f"bytes {start}+{length} lie outside of the body of {entry.file}")
    if _table_checksum(memory, entry.checksums) != entry.checksum:
        raise ManifestError(
            f"the shard {entry.file} is corrupt: its block table does not match its checksum"
        )
    check_layout(memory, entry)
    table = np.frombuffer(
        memory, dtype="<u8", count=entry.checksums[1] // 8, offset=entry.checksums[0]
    )
    for number in blocks_of(entry, spans):
        begin = first + number * entry.block_bytes
        stop = min(begin + entry.block_bytes, first + size)
        if xxhash.xxh3_64_intdigest(memory[begin:stop]) != table[1 + number]:
            raise ManifestError(
                f"the shard {entry.file} is corrupt: bytes {begin} to {stop} do not match their "
                "checksum"
            )


def check_layout(memory: memoryview, entry: Checksummed) -> None:
    """Raise `ManifestError` when the shard was written with another layout than the entry's."""
    start = entry.checksums[0]
    if int.from_bytes(memory[start : start + 8], "little") != entry.layout:
        raise ManifestError(
            f"what the manifest says of the rows, lengths or columns of {entry.file} is not what "
            "the shard was written with: its stage must be repeated"
        )


def verify_body(memory: memoryview, entry: Checksummed) -> None:
    """Check the whole body of a shard; errors as in `verify_blocks`."""
    verify_blocks(memory, entry, [entry.body])


def _table_checksum(memory: memoryview, table: Span) -> str:
    return xxhash.xxh3_64_hexdigest(memory[table[0] : table[0] + table[1]])


_threads: dict[int, ThreadPoolExecutor] = {}
"""Threads that compute checksums, by process, because a forked child has none of its parent's."""


def in_background(job: Callable[[], str]) -> Future[str]:
    """Run `job`, which fills a table and returns its checksum, after those before it."""
    fresh = ThreadPoolExecutor(1, thread_name_prefix="checksums")
    return _threads.setdefault(os.getpid(), fresh).submit(job)


def described(
    schema: pa.Schema, ids: np.ndarray, elements: Mapping[str, np.ndarray], host: str, file: str
) -> ShardEntry:
    """The entry that a shard of such rows would have, of which nothing is written: what a plan
    needs to know of one.

    ids: int64 sample_ids, ascending. elements: int64 elements of each row by the name of a column
    or of an axis; columns for which there are none are empty. file: as `SHARD_PATTERN` has it.
    """
    none = np.zeros(len(ids), dtype=np.int64)
    skeleton = make_skeleton(
        schema,
        len(ids),
        {
            field.name: elements.get(field.name, elements.get(axis_name(field), none))
            for field in schema
            if pa.types.is_large_list(field.type) or pa.types.is_large_string(field.type)
        },
        {},
    )
    table = table_bytes(skeleton.body[1])
    size = skeleton.least_bytes(table)
    return ShardEntry(
        host=host,
        file=file,
        bytes=size,
        generation=0,
        rows=len(ids),
        row_ids=tuple(ids.tolist()),
        axes={axis: tuple(each.tolist()) for axis, each in skeleton.axes.items()},
        columns=skeleton.columns,
        body=skeleton.body,
        checksums=skeleton.table(size, table),
        block_bytes=BLOCK_BYTES,
        checksum="0" * 16,
    )
