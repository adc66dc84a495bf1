"""Which bytes of a plan's shards cross between hosts, and where they land in memory."""

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


class Traffic:
    """What crosses between the hosts of a plan: every byte once for all ranks of a host."""

    def __init__(self, plan: DispatchPlan) -> None:
        self.plan = plan
        self._hosts = sorted({*plan.hosts, *(entry.host for entry in plan.entries)})
        number = {name: index for index, name in enumerate(self._hosts)}
        self._host_of_shard = np.array([number[e.host] for e in plan.entries], dtype=np.int64)
        pairs = {(number[name], plan.layout.replica(rank)) for rank, name in enumerate(plan.hosts)}
        self._consumers = sorted(pairs)
        """(host, replica): all ranks of a replica need the same bytes."""

    def incoming(self, host: str) -> Incoming:
        """What one consumer host reads from other hosts."""
        here = [(number, r) for number, r in self._consumers if self._hosts[number] == host]
        _, shard, start, length = merge(*self._pieces(here))
        return Incoming(shard, start, length)

    @cached_property
    def by_host(self) -> dict[str, Incoming]:
        """`incoming` of every consumer host."""
        host, shard, start, length = merge(*self._pieces(self._consumers))
        numbers = sorted({number for number, _ in self._consumers})
        firsts = np.searchsorted(host, numbers, "left").tolist()
        lasts = np.searchsorted(host, numbers, "right").tolist()
        return {
            self._hosts[number]: Incoming(shard[a:b], start[a:b], length[a:b])
            for number, a, b in zip(numbers, firsts, lasts, strict=True)
        }

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that cross the network."""
        return sum(incoming.moved_bytes for incoming in self.by_host.values())

    @cached_property
    def needed_bytes(self) -> int:
        """Bytes that consumer hosts need, each counted once per host, local ones too."""
        rows = self._expanded(self._consumers)[0]
        return sum(int(c.length[rows].sum()) for c in self.plan.sources.columns.values())

    @property
    def local_share(self) -> float:
        """Share of the needed bytes that already lie on the host that needs them."""
        return 1.0 - self.moved_bytes / self.needed_bytes if self.needed_bytes else 1.0

    def _expanded(self, consumers: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Every (row, host) pair of these consumers."""
        empty = np.empty(0, dtype=np.int64)
        rows = [self.plan.members(replica) for _, replica in consumers]
        host = np.repeat(np.array([n for n, _ in consumers], np.int64), [len(one) for one in rows])
        return np.concatenate([empty, *rows]), host

    def _pieces(
        self, consumers: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(host, shard, start, length) of all that these consumers read from other hosts."""
        every_row, every_host = self._expanded(consumers)
        remote: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        empty = np.empty(0, dtype=np.int64)
        parts = [(empty, empty, empty, empty)]
        for source in self.plan.sources.columns.values():
            if source.manifest not in remote:
                shard = source.shard[every_row]
                away = self._host_of_shard[shard] != every_host
                remote[source.manifest] = (every_row[away], every_host[away], shard[away])
            rows, host, shard = remote[source.manifest]
            length = source.length[rows]
            some = length > 0
            if some.all():
                parts.append((host, shard, source.start[rows], length))
            else:
                parts.append((host[some], shard[some], source.start[rows[some]], length[some]))
        host, shard, start, length = (np.concatenate(column) for column in zip(*parts, strict=True))
        return host, shard, start, length


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
