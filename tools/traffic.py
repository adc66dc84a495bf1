"""Bytes that cross between all the hosts of a plan, and the time they take, by either way.

The time is that of a bandwidth and latency model: N hosts, each with one full-duplex link and b
bytes of the batch.

- single controller: N - 1 hosts send their bytes to the controller's host and, after a barrier,
  receive as many from it: 2 (N - 1) b through one link. The controller is charged one copy of
  every byte even where several hosts need it, and nothing for pickling: both favour it.
- direct: every host receives what it needs and does not hold, (1 - l) f d b on average, all links
  at once; the busiest one, of a receiver or of a sender, decides, k = 1 + imbalance times the
  average.

So the speedup tends to 2 (N - 1) / ((1 - l) f d k) for large batches. Latency is what remains
when nothing has to move: peers agree that they are done.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

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
        """Map every consumer host to the bytes that it reads from the others."""
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


Manner = Literal["single_controller", "direct"]

PAYLOAD_SHARE = 1448 / 1514
"""Payload of a full TCP segment (timestamps on) over its Ethernet frame."""
ROUND_SECONDS = 0.7e-3
"""One round of small messages among all hosts: what a fetch took with every row local."""


def predict(
    hosts: int,
    bytes_per_host: float,
    link_bits_per_second: float,
    local_share: float,
    needed_share: float,
    duplication: float,
    imbalance: float,
    manner: Manner,
) -> float:
    """Seconds to bring a batch from its producers to its consumers.

    bytes_per_host: bytes that each of the `hosts` made. local_share: share of the needed bytes
    that lie on the host that needs them. needed_share: share of the bytes (columns, tokens) that
    any consumer needs. duplication: hosts that need the same bytes. imbalance: how far the
    busiest host's transfers lie above the mean, as a share of it. Raises `ValueError`.
    """
    if hosts < 1 or link_bits_per_second <= 0:
        raise ValueError("a prediction needs at least one host and a link rate above 0")
    rate = link_bits_per_second / 8 * PAYLOAD_SHARE
    if manner == "single_controller":
        return 2 * (hosts - 1) * bytes_per_host / rate + 2 * ROUND_SECONDS
    if manner == "direct":
        received = (1 - local_share) * needed_share * duplication * bytes_per_host
        return received * (1 + imbalance) / rate + ROUND_SECONDS
    raise ValueError(f"{manner!r} is neither 'single_controller' nor 'direct'")
