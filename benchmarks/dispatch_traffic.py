"""What crosses between all the hosts of a plan, worked out for all of them at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from earl_core.dispatch.reads.plan import DispatchPlan
from earl_core.dispatch.remote.incoming import Incoming, merge


class Traffic:
    """Every byte counts once for all ranks of a host."""

    def __init__(self, plan: DispatchPlan) -> None:
        self.plan = plan
        self._hosts = sorted({*plan.hosts, *(entry.host for entry in plan.entries)})
        number = {name: index for index, name in enumerate(self._hosts)}
        self._host_of_shard = np.array([number[e.host] for e in plan.entries], dtype=np.int64)
        pairs = {(number[name], plan.layout.replica(rank)) for rank, name in enumerate(plan.hosts)}
        self._consumers = sorted(pairs)
        """(host, replica): all ranks of a replica need the same bytes."""

    @cached_property
    def by_host(self) -> dict[str, Incoming]:
        """What every consumer host reads from the others."""
        rows, hosts = self._expanded()
        empty, shards = np.empty(0, dtype=np.int64), len(self.plan.entries)
        parts = [(empty, empty, empty)]
        for source in self.plan.sources.columns.values():
            shard, length = source.shard[rows], source.length[rows]
            away = (self._host_of_shard[shard] != hosts) & (length > 0)
            # A shard as one host receives it has a number of its own.
            own = hosts[away] * shards + shard[away]
            parts.append((own, source.start[rows[away]], length[away]))
        key, start, length = merge(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        host, shard = np.divmod(key, max(1, shards))
        found = {}
        for number in sorted({number for number, _ in self._consumers}):
            mine = slice(*np.searchsorted(host, [number, number + 1]).tolist())
            found[self._hosts[number]] = Incoming(shard[mine], start[mine], length[mine])
        return found

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that cross the network."""
        return sum(int(incoming.length.sum()) for incoming in self.by_host.values())

    @cached_property
    def needed_bytes(self) -> int:
        """Bytes that consumer hosts need, each counted once per host, local ones too."""
        rows = self._expanded()[0]
        return sum(int(c.length[rows].sum()) for c in self.plan.sources.columns.values())

    @property
    def local_share(self) -> float:
        """Share of the needed bytes that already lie on the host that needs them."""
        return 1.0 - self.moved_bytes / self.needed_bytes if self.needed_bytes else 1.0

    def _expanded(self) -> tuple[np.ndarray, np.ndarray]:
        """Every pair of a row and a host that needs it."""
        rows = [self.plan.members(replica) for _, replica in self._consumers]
        hosts = np.array([number for number, _ in self._consumers], dtype=np.int64)
        every = np.concatenate([np.empty(0, dtype=np.int64), *rows])
        return every, np.repeat(hosts, [len(one) for one in rows])
