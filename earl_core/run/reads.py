"""How the ranks of a run read each other's shards: here or from other hosts, by one factory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from earl_core.cluster.rpc import Rule
from earl_core.dispatch.reads.batch import Batch
from earl_core.dispatch.reads.plan import DispatchPlan
from earl_core.dispatch.shards.store import ShardStore

if TYPE_CHECKING:
    from earl_core.dispatch.remote.tcp import TcpTransport


READ_RULES: dict[str, Rule] = {"read_seconds": "max", "remote_bytes": "sum"}
"""How `PlanReads.spent` of several ranks becomes one: a stage waits for its slowest rank."""


class Peers(NamedTuple):
    """The range servers of a run's hosts, by host name; none: all shards lie on this host."""

    addresses: Mapping[str, tuple[str, int]] = {}
    token: str = ""

    def memories(self, hosts: Sequence[str]) -> list[str]:
        """A name of the shared memory that each of these hosts uses; parts of one machine have one
        together."""
        return [str(self.addresses.get(host)) for host in hosts]


class PlanReads:
    """Opens a rank's share of a plan. verify: check the bytes of this host's shards, too."""

    def __init__(self, store: ShardStore, verify: bool = False, peers: Peers = Peers()) -> None:  # noqa: B008  (it cannot change)
        self.store = store
        self._verify = verify
        self._transport: TcpTransport | None = None
        self._seconds = 0.0
        if peers.addresses:
            from earl_core.dispatch.remote.tcp import TcpTransport

            addresses = {host: (at[0], at[1]) for host, at in peers.addresses.items()}
            self._transport = TcpTransport(addresses, peers.token)

    def open(self, plan: DispatchPlan, rank: int) -> Batch:
        """The rows and columns that the plan gives to the rank. Raises what `Batch`, and for shards
        of other hosts `fetch`, raises."""
        started = time.perf_counter()
        try:
            if self._transport is None:
                return Batch.of(plan.sources_of(rank), self.store, self._verify)
            from earl_core.dispatch.remote.fetch import fetch

            return fetch(plan, rank, self.store, self._transport, verify=self._verify)
        finally:
            self._seconds += time.perf_counter() - started

    def spent(self) -> dict[str, float]:
        """Metrics of the reads since this was last asked: their seconds, and the bytes that came
        from other hosts."""
        seconds, self._seconds = self._seconds, 0.0
        if self._transport is None:
            return {"read_seconds": seconds}
        received, self._transport.received_bytes = self._transport.received_bytes, 0
        return {"read_seconds": seconds, "remote_bytes": received}
