"""Byte ranges of shards: what is asked of a host, and where it lands in the receiver's memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from earl_core.dispatch.shards.manifest import ManifestError

ALIGNMENT = 8
"""Bytes. The widest column type; a landed range keeps its position modulo this, so that views
of every dtype are aligned in the receiver's memory as they were in the shard."""


class Range(NamedTuple):
    """`length` bytes from byte `start` of a shard's file, which must be of this generation."""

    file: str
    generation: int
    start: int
    length: int


class Read(NamedTuple):
    """The bytes of one column of one row (`row` is its sample_id) that one rank needs."""

    host: str
    file: str
    generation: int
    column: str
    row: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Incoming:
    """What one consumer host reads from other hosts: disjoint ranges, none adjacent to the next.

    Ascending by (shard, start). shard: int64, index into the plan's `entries`; start, length:
    int64, bytes within the shard's file.
    """

    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the network."""
        return int(self.length.sum())

    @cached_property
    def place(self) -> np.ndarray:
        """int64: where each range lands in one receive buffer of `size` bytes."""
        lead = self.start % ALIGNMENT
        taken = -(-(lead + self.length) // ALIGNMENT) * ALIGNMENT
        return np.cumsum(taken) - taken + lead

    @property
    def size(self) -> int:
        """Bytes of the receive buffer."""
        return int(self.place[-1] + self.length[-1]) if len(self) else 0

    def find(self, shard: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        """int64: where these bytes of shards lie in the receive buffer; 0 for pieces of no bytes.

        Raises `KeyError` when this host does not read one of them.
        """
        place = np.zeros(len(shard), dtype=np.int64)
        asked = np.flatnonzero(length)
        if not len(asked):
            return place
        if not len(self):
            raise KeyError("nothing comes in from other hosts")
        shard, start, length = shard[asked], start[asked], length[asked]
        stride = int(max(self.start.max(), start.max())) + 1
        found = np.searchsorted(self.shard * stride + self.start, shard * stride + start, "right")
        index = np.maximum(found - 1, 0)
        within = start - self.start[index]
        wrong = (self.shard[index] != shard) | (within < 0)
        wrong |= within + length > self.length[index]
        if wrong.any():
            first = int(np.argmax(wrong))
            raise KeyError(f"bytes from {start[first]} of shard {shard[first]} do not come in")
        place[asked] = self.place[index] + within
        return place


def merge(
    host: np.ndarray, shard: np.ndarray, start: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Sort pieces by (host, shard, start) and join those that touch. All arrays int64.

    Raises `ManifestError` when pieces overlap: the manifest lets two columns share bytes.
    """
    if not len(host):
        return host, shard, start, length
    order = _order(host, shard, start)
    host, shard, start, length = host[order], shard[order], start[order], length[order]
    gap = start[1:] - (start[:-1] + length[:-1])
    same = (shard[1:] == shard[:-1]) & (host[1:] == host[:-1])
    if (same & (gap < 0)).any():
        raise ManifestError("the columns of a shard overlap: its manifest is damaged")
    begins = np.ones(len(host), dtype=bool)
    begins[1:] = ~same | (gap > 0)
    first = np.flatnonzero(begins)
    return host[first], shard[first], start[first], np.add.reduceat(length, first)


def _order(host: np.ndarray, shard: np.ndarray, start: np.ndarray) -> np.ndarray:
    shards, stride = int(shard.max()) + 1, int(start.max()) + 1
    if (int(host.max()) + 1) * shards * stride < 2**63:
        # One key sorts several times faster than three.
        return np.argsort((host * shards + shard) * stride + start, kind="stable")
    return np.lexsort((start, shard, host))
