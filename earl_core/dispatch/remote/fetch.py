"""Bring one rank its share of a plan: views of what lies here, received parts of what does not."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import xxhash

from earl_core.dispatch.reads.batch import Batch, Lease, abandon, open_shards
from earl_core.dispatch.reads.plan import DispatchPlan
from earl_core.dispatch.reads.sources import Sources
from earl_core.dispatch.remote.incoming import incoming_of
from earl_core.dispatch.remote.parts import Part, PartStore, cut_parts
from earl_core.dispatch.remote.tcp import TcpTransport
from earl_core.dispatch.remote.transport import Range, RemoteRead
from earl_core.dispatch.segments.leases import Mapped
from earl_core.dispatch.segments.segment import Segment
from earl_core.dispatch.shards.shard import Proof
from earl_core.dispatch.shards.store import ShardStore
from earl_core.system.processes import host_name

PART_BYTES = 256 * 2**20
"""About so much is received into one segment, so that the ranks of a host can share the work."""

_NOWHERE = -1
"""The memory of rows of no bytes on other hosts."""


def fetch(
    plan: DispatchPlan,
    rank: int,
    store: ShardStore,
    transport: TcpTransport,
    *,
    verify: bool = False,
    wait_seconds: float = 600.0,
    part_bytes: int = PART_BYTES,
) -> Batch:
    """The rows and columns that `plan` gives to `rank`.

    Bytes on this host are not copied. Bytes on other hosts are received once for all ranks of this
    host that call this with an equal plan, in any order and at any time; they are released when the
    last of them closes its batch. verify: check the shards of this host too; bytes from others are
    always checked. wait_seconds: how long another rank may take to receive what both need.

    Raises `ManifestError` for a missing or damaged shard of this host,
    `TransportError` for one of another, `PoolFull` when there is no room to receive,
    `ValueError` when the rank does not belong to this host.
    """
    host = plan.hosts[rank]
    if host != host_name():
        raise ValueError(
            f"the plan places rank {rank} on host {host!r}, and this is {host_name()!r}: name the "
            "hosts in the layout as they name themselves, or set EARL_HOST"
        )
    share = _Share(plan, host, part_bytes)
    sources = share.sources_of(plan.layout.replica(rank))
    numbers = sources.shards()
    mapped = open_shards(store, sources, [n for n in numbers if 0 <= n < len(plan.entries)], verify)
    memories = {number: one.memory for number, one in mapped.items()}
    memories[_NOWHERE] = memoryview(b"")
    leases: list[Lease] = list(mapped.values())
    try:
        if numbers and numbers[-1] >= len(plan.entries):
            parts, done = share.receive(rank, store, transport, wait_seconds)
            # Leases are closed last first: the parts are done with when no view of them is left.
            leases += [done, *parts.values()]
            memories |= {len(plan.entries) + n: part.memory for n, part in parts.items()}
        return Batch.over(sources, memories, leases)
    except BaseException:
        abandon(leases)
        raise


class _Share:
    """The bytes that one host receives for a plan, in parts, and the ranks of the host that need
    each part."""

    def __init__(self, plan: DispatchPlan, host: str, part_bytes: int) -> None:
        self._plan = plan
        self._host = host
        self._incoming = incoming_of(plan, host)
        self._parts = cut_parts(self._incoming, part_bytes)
        self._bases = np.array([part.base for part in self._parts], dtype=np.int64)
        self._away = np.array([entry.host != host for entry in plan.entries], dtype=bool)

    def sources_of(self, replica: int) -> Sources:
        """A replica's rows; what comes in lies in parts, numbered after the shards."""
        sources = self._plan.sources.take(self._plan.members(replica))
        columns = {}
        for name, column in sources.columns.items():
            away = self._away[column.shard]
            some = away & (column.length > 0)
            place = self._incoming.find(column.shard[some], column.start[some], column.length[some])
            number = np.searchsorted(self._bases, place, "right") - 1
            shard, start = column.shard.copy(), column.start.copy()
            shard[away], start[away] = _NOWHERE, 0
            shard[some] = len(self._plan.entries) + number
            start[some] = place - self._bases[number]
            columns[name] = replace(column, shard=shard, start=start)
        return replace(sources, columns=columns)

    def receive(
        self, rank: int, store: ShardStore, transport: TcpTransport, wait_seconds: float
    ) -> tuple[dict[int, Mapped], ExitStack]:
        """Leases on the parts that hold rows of this rank, by number; what to close after them, so
        that the last rank of the host releases the parts."""
        plan = self._plan
        ranks = [other for other, name in enumerate(plan.hosts) if name == self._host]
        needs: dict[int, list[int]] = {}
        users: list[set[int]] = [set() for _ in self._parts]
        for other in ranks:
            replica = plan.layout.replica(other)
            if replica not in needs:
                numbers = [n - len(plan.entries) for n in self.sources_of(replica).shards()]
                needs[replica] = [number for number in numbers if number >= 0]
            for number in needs[replica]:
                users[number].add(other)

        def receive(part: Part, segment: Segment) -> None:
            self._read_part(part, segment, transport)

        mine = needs[plan.layout.replica(rank)]
        # Ranks that need the same parts begin with different ones.
        turn = ranks.index(rank) * len(mine) // len(ranks)
        order = [self._parts[number] for number in mine[turn:] + mine[:turn]]
        # Hosts that are parts of one machine may have one store.
        name = xxhash.xxh3_64_hexdigest(f"{plan.digest} {self._host}".encode())
        kept = PartStore(store.pool, name, self._parts, users)
        with ExitStack() as done:
            done.callback(kept.done, rank)
            return kept.obtain(order, rank, receive, wait_seconds), done.pop_all()

    def _read_part(self, part: Part, segment: Segment, transport: TcpTransport) -> None:
        ranges: dict[str, list[Range]] = {}
        into: dict[str, list[memoryview]] = {}
        proofs: dict[str, Proof] = {}
        incoming, chosen = self._incoming, slice(part.first, part.last)
        columns = (incoming.shard, incoming.start, incoming.length, incoming.place - part.base)
        for shard, start, length, place in zip(
            *(one[chosen].tolist() for one in columns), strict=True
        ):
            entry = self._plan.entries[shard]
            if entry.file not in proofs:
                proofs[entry.file] = Proof.of(entry)
            item = Range(entry.file, entry.generation, start, length)
            ranges.setdefault(entry.host, []).append(item)
            into.setdefault(entry.host, []).append(segment.memory[place : place + length])
        reads = {host: RemoteRead(ranges[host], into[host]) for host in ranges}
        transport.read_all(reads, proofs)
