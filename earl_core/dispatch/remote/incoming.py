"""Ranges of a plan's shards that cross between hosts, and their places in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from earl_core.dispatch.reads.plan import DispatchPlan
from earl_core.dispatch.shards.manifest import ManifestError

ALIGNMENT = 8
"""Bytes. The widest column type; a landed range keeps its position modulo this, so that views
of every dtype are aligned in the receiver's memory as they were in the shard."""


@dataclass(frozen=True, eq=False)
class Incoming:
    """Ranges that one consumer host reads from other hosts: disjoint, none adjacent to the next.

    Ascending by (shard, start). shard: int64, index into the plan's `entries`; start, length:
    int64, bytes within the shard's file.
    """

    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.shard)

    @cached_property
    def place(self) -> np.ndarray:
        """int64: where each range lands in one receive buffer."""
        lead = self.start % ALIGNMENT
        taken = -(-(lead + self.length) // ALIGNMENT) * ALIGNMENT
        return np.cumsum(taken) - taken + lead

    def find(self, shard: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        """int64: where these bytes of shards lie in the receive buffer; 0 for pieces of no bytes.
        Raises `KeyError` when this host does not read one of them."""
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


def incoming_of(plan: DispatchPlan, host: str) -> Incoming:
    """List the ranges that a consumer host reads from other hosts: every byte once for its ranks.
    Raises `ManifestError` when columns overlap."""
    # All ranks of a replica need the same bytes.
    replicas = {plan.layout.replica(rank) for rank, name in enumerate(plan.hosts) if name == host}
    empty = np.empty(0, dtype=np.int64)
    rows = np.concatenate([empty, *(plan.members(replica) for replica in sorted(replicas))])
    away = np.array([entry.host != host for entry in plan.entries], dtype=bool)
    pieces = [(empty, empty, empty)]
    for source in plan.sources.columns.values():
        shard, length = source.shard[rows], source.length[rows]
        chosen = away[shard] & (length > 0)
        pieces.append((shard[chosen], source.start[rows[chosen]], length[chosen]))
    shard, start, length = (np.concatenate(part) for part in zip(*pieces, strict=True))
    return Incoming(*merge(shard, start, length))


def merge(
    shard: np.ndarray, start: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort pieces by (shard, start) and join those that touch. All arrays int64. Raises
    `ManifestError` when pieces overlap: the manifest lets two columns share bytes."""
    if not len(shard):
        return shard, start, length
    # One key sorts several times faster than two, and shards are far smaller than 2**63 together.
    order = np.argsort(shard * (int(start.max()) + 1) + start, kind="stable")
    shard, start, length = shard[order], start[order], length[order]
    gap = start[1:] - (start[:-1] + length[:-1])
    same = shard[1:] == shard[:-1]
    if (same & (gap < 0)).any():
        raise ManifestError("the columns of a shard overlap: its manifest is damaged")
    begins = np.ones(len(shard), dtype=bool)
    begins[1:] = ~same | (gap > 0)
    first = np.flatnonzero(begins)
    return shard[first], start[first], np.add.reduceat(length, first)
