"""Checksums of shards: one for each block of the body, so that any range can be verified alone.

The block table lies in the shard itself, in the gap between the body and the footer: one uint64
for the layout (`ShardEntry.layout`), then one xxh3_64 for each `BLOCK_BYTES` of the body, the last
block shorter. The manifest holds the xxh3_64 of the table. So the manifest vouches for the bytes,
and the shard for what the manifest says of its rows, lengths and columns. Both depend on the data
alone: equal data has equal checksums wherever and whenever it was written. A table is filled by a
thread of the producer after the shard was published, off the hot path; until then the entry's
checksum is empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import xxhash

from earl_core.dispatch.shards.manifest import ManifestError, ShardEntry, Span

BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Proof:
    """What a manifest says about a shard's file that lets its bytes be checked.

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
        """From a manifest's entry. Raises `ManifestError` while the checksum is pending."""
        if not entry.checksum:
            raise ManifestError(
                f"the shard {entry.file} has no checksum yet, so its bytes cannot be proved to "
                "another host: seal the manifest before other hosts read it"
            )
        return cls(**{field.name: getattr(entry, field.name) for field in fields(cls)})


Checksummed = ShardEntry | Proof
"""What says enough of a shard to verify it."""


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
"""By process, because a forked child has none of its parent's threads."""


def in_background(job: Callable[[], str]) -> Future[str]:
    """Run `job`, which fills a table and returns its checksum, after those before it."""
    fresh = ThreadPoolExecutor(1, thread_name_prefix="checksums")
    return _threads.setdefault(os.getpid(), fresh).submit(job)
