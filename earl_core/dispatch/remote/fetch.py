"""Bring one rank its share of a plan: views of what lies here, received parts of what does not.

Parts are segments with bytes of other hosts, shared by all ranks of this one. The bytes that come
in for one plan are cut into parts. Whoever needs a part and finds nobody at it receives it; the
others wait and then map it, so that every byte crosses the network once per host. A claim is a lock
on one byte of a file: it goes with its process, so that after a SIGKILL the next one who waits
takes over. A part is released when all ranks of the host that need it are done with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from earl_core.dispatch.reads.batch import Batch, Lease, abandon, open_shards
from earl_core.dispatch.reads.plan import DispatchPlan
from earl_core.dispatch.reads.sources import Sources
from earl_core.dispatch.remote.incoming import ALIGNMENT, Incoming, incoming_of
from earl_core.dispatch.remote.tcp import TcpTransport
from earl_core.dispatch.remote.transport import Range, RemoteRead, TransportError
from earl_core.dispatch.segments.leases import Mapped, ShardMismatch, map_shared
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.dispatch.segments.pool_directory import FETCH_LOCK, unlink_own
from earl_core.dispatch.segments.segment import Segment
from earl_core.dispatch.shards.shard import Proof
from earl_core.dispatch.shards.store import ShardStore
from earl_core.system.files import lock_bytes, unlock_bytes
from earl_core.system.processes import host_name

_PAUSES = (0.0005, 0.02)  # seconds between looks at a part that another rank receives


@dataclass(frozen=True)
class _Part:
    """Ranges `first:last` of what comes in. base, size: bytes, in the receive buffer's places."""

    number: int
    first: int
    last: int
    base: int
    size: int


def cut_parts(incoming: Incoming, most: int) -> list[_Part]:
    """Cut what comes in into parts of about `most` bytes; a range is never divided."""
    found: list[_Part] = []
    first = 0
    places, ends = incoming.place, incoming.place + incoming.length
    while first < len(incoming):
        base = int(places[first]) // ALIGNMENT * ALIGNMENT
        last = max(first + 1, int(np.searchsorted(ends, base + most, "right")))
        found.append(_Part(len(found), first, last, base, int(ends[last - 1]) - base))
        first = last
    return found


class _PartStore:
    """The parts of one plan on this host. digest: of both. users: the ranks that need each part."""

    def __init__(
        self, pool: SegmentPool, digest: str, parts: Sequence[_Part], users: Sequence[set[int]]
    ) -> None:
        self._pool = pool
        self._digest = digest
        self._parts = parts
        self._users = users

    def path(self, part: _Part) -> Path:
        """Return the path of a part once it is here."""
        return self._pool.directory / f"fetch-{self._digest}-{part.number}.part"

    def obtain(
        self,
        needed: Sequence[_Part],
        rank: int,
        receive: Callable[[_Part, Segment], None],
        wait_seconds: float,
    ) -> dict[int, Mapped]:
        """Lease the parts, by number, after receiving those that nobody else does. Raises
        `TransportError` when another rank does not finish in time; what `receive` raises."""
        unlink_own(self._mark(rank))
        found: dict[int, Mapped] = {}
        deadline = time.monotonic() + wait_seconds
        pause = _PAUSES[0]
        while len(found) < len(needed):
            before = len(found)
            for part in needed:
                mapped = None if part.number in found else self._one(part, receive)
                if mapped is not None:
                    found[part.number] = mapped
            if len(found) > before:
                pause = _PAUSES[0]
            elif time.monotonic() > deadline:
                missing = [part.number for part in needed if part.number not in found]
                raise TransportError(
                    f"another rank of this host receives the parts {missing} of a plan and did "
                    f"not finish within {wait_seconds:.0f} s: see whether it hangs"
                )
            else:
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])
        return found

    def _one(self, part: _Part, receive: Callable[[_Part, Segment], None]) -> Mapped | None:
        """A lease on the part; None while another process receives it."""
        mapped = self._map(part)
        if mapped is not None:
            return mapped
        with self._claimed(part) as mine:
            if not mine:
                return None
            # It may have come between the look and the claim.
            if not self.path(part).exists():
                with self._pool.acquire(part.size) as segment:
                    receive(part, segment)
                    segment.seal(self.path(part).name)
            return self._map(part)

    def _map(self, part: _Part) -> Mapped | None:
        path = self.path(part)
        try:
            return map_shared(path, path.stat().st_size)
        except (FileNotFoundError, ShardMismatch):
            return None

    @contextmanager
    def _claimed(self, part: _Part) -> Iterator[bool]:
        """Claim the part; true if this process may receive it. Threads exclude each other too."""
        self._pool.make()
        path = self._pool.directory / FETCH_LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
        byte = xxhash.xxh3_64_intdigest(self.path(part).name.encode()) >> 2
        try:
            yield lock_bytes(descriptor, byte, 1)
        finally:
            # Said, not left to closing: a child forked meanwhile has the descriptor too.
            unlock_bytes(descriptor, byte, 1)
            os.close(descriptor)

    def done(self, rank: int) -> None:
        """Note that a rank needs its parts no more, and release those that nobody needs."""
        self._mark(rank).touch(mode=0o600)
        everyone = set().union(*self._users)
        finished = {each for each in everyone if self._mark(each).exists()}
        left = [
            part
            for part, users in zip(self._parts, self._users, strict=True)
            if not users <= finished or not self._pool.release(self.path(part))
        ]
        if not left:
            for each in everyone:
                unlink_own(self._mark(each))

    def _mark(self, rank: int) -> Path:
        return self._pool.directory / f".fetch-{self._digest}.{rank}.done"


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
    """The bytes that a host receives for a plan, in parts, and its ranks that need each part."""

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

        def receive(part: _Part, segment: Segment) -> None:
            self._read_part(part, segment, transport)

        mine = needs[plan.layout.replica(rank)]
        # Ranks that need the same parts begin with different ones.
        turn = ranks.index(rank) * len(mine) // len(ranks)
        order = [self._parts[number] for number in mine[turn:] + mine[:turn]]
        # Hosts that are parts of one machine may have one store.
        name = xxhash.xxh3_64_hexdigest(f"{plan.digest} {self._host}".encode())
        kept = _PartStore(store.pool, name, self._parts, users)
        with ExitStack() as done:
            done.callback(kept.done, rank)
            return kept.obtain(order, rank, receive, wait_seconds), done.pop_all()

    def _read_part(self, part: _Part, segment: Segment, transport: TcpTransport) -> None:
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
