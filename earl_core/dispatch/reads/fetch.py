"""Bring one rank its share of a plan: views of what lies here, received parts of what does not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from earl_core.dispatch.reads.batch import Batch, Kind, Lease, Located
from earl_core.dispatch.reads.parts import Part, PartLease, PartStore, cut_parts
from earl_core.dispatch.reads.plan import DispatchPlan, RowSource
from earl_core.dispatch.remote.transport import Proof, RemoteRead, Transport
from earl_core.dispatch.segments.pool import Segment
from earl_core.dispatch.shards.ranges import Incoming, Range
from earl_core.dispatch.shards.store import ShardStore
from earl_core.system.host import host_name

PART_BYTES = 256 * 2**20
"""About so much is received into one segment, so that the ranks of a host can share the work."""


@dataclass(frozen=True, eq=False)
class _Wanted:
    """A rank's rows of one column. remote: bool per row; place: int64 in the receive buffer."""

    source: RowSource
    remote: np.ndarray
    place: np.ndarray


def fetch(
    plan: DispatchPlan,
    rank: int,
    store: ShardStore,
    transport: Transport,
    *,
    verify: bool = False,
    wait_seconds: float = 600.0,
    part_bytes: int = PART_BYTES,
) -> Batch:
    """The rows and columns that `plan` gives to `rank`, cut to the rank's tokens.

    What lies on this host is not copied. What lies on others is received once for all ranks of
    this host that call this with an equal plan, in any order and at any time; it is released when
    the last of them closes its batch. verify: check the shards of this host too; what comes from
    others always is. wait_seconds: how long another rank may take to receive what both need.

    Raises `ManifestError` (`ShardCorrupt`) for a missing or damaged shard of this host,
    `TransportError` for one of another, `PoolFull` when there is no room to receive,
    `ValueError` when the rank does not belong to this host.
    """
    host = plan.hosts[rank]
    if host != host_name():
        raise ValueError(
            f"the plan places rank {rank} on host {host!r}, and this is {host_name()!r}: name the "
            "hosts in the layout as they name themselves, or set EARL_HOST"
        )
    incoming = plan.incoming(host)
    parts = cut_parts(incoming, part_bytes)
    wanted = _wanted(plan, rank, host, incoming)
    leases: list[Lease] = []
    try:
        shards = _open_shards(plan, wanted, store, verify, leases)
        received: Mapping[int, memoryview] = {}
        if any(column.remote.any() for column in wanted.values()):
            received = _receive(
                plan, rank, wanted, incoming, parts, store, transport, wait_seconds, leases
            )
        columns = {
            name: _located(plan, name, column, shards, parts, received)
            for name, column in wanted.items()
        }
        return Batch.from_located(plan.rows(rank), columns, leases)
    except BaseException:
        for lease in reversed(leases):
            # The traceback keeps views alive; the lease then goes with the last of them.
            with contextlib.suppress(BufferError):
                lease.close()
        raise


def _wanted(plan: DispatchPlan, rank: int, host: str, incoming: Incoming) -> dict[str, _Wanted]:
    here = np.array([entry.host == host for entry in plan.entries], dtype=bool)
    found = {}
    for name in plan.columns:
        source = plan.locate(rank, name)
        remote = ~here[source.shard] & (source.length > 0)
        place = np.zeros(len(source.shard), dtype=np.int64)
        chosen = (source.shard[remote], source.start[remote], source.length[remote])
        place[remote] = incoming.find(*chosen)
        found[name] = _Wanted(source, remote, place)
    return found


def _part_numbers(parts: list[Part], wanted: Mapping[str, _Wanted]) -> set[int]:
    bases = np.array([part.base for part in parts], dtype=np.int64)
    numbers: set[int] = set()
    for column in wanted.values():
        places = column.place[column.remote]
        numbers.update((np.searchsorted(bases, places, "right") - 1).tolist())
    return numbers


def _open_shards(
    plan: DispatchPlan,
    wanted: Mapping[str, _Wanted],
    store: ShardStore,
    verify: bool,
    leases: list[Lease],
) -> dict[int, memoryview]:
    """Map the shards of this host that hold rows of this rank, by their numbers in the plan."""
    numbers: set[int] = set()
    for column in wanted.values():
        local = ~column.remote & (column.source.length > 0)
        numbers.update(column.source.shard[local].tolist())
    found = {}
    for number in sorted(numbers):
        mapped = store.open(plan.entries[number], verify=verify)
        leases.append(mapped)
        found[number] = mapped.memory
    return found


def _receive(
    plan: DispatchPlan,
    rank: int,
    wanted: Mapping[str, _Wanted],
    incoming: Incoming,
    parts: list[Part],
    store: ShardStore,
    transport: Transport,
    wait_seconds: float,
    leases: list[Lease],
) -> dict[int, memoryview]:
    """The parts that hold rows of this rank, by number."""
    host = plan.hosts[rank]
    ranks = [other for other, name in enumerate(plan.hosts) if name == host]
    users: list[set[int]] = [set() for _ in parts]
    needs: dict[tuple[int, int], set[int]] = {}
    for other in ranks:
        data, context, _ = plan.layout.coordinates(other)
        if (data, context) not in needs:
            needed = wanted if other == rank else _wanted(plan, other, host, incoming)
            needs[data, context] = _part_numbers(parts, needed)
        for number in needs[data, context]:
            users[number].add(other)

    def receive(part: Part, segment: Segment) -> None:
        _read_part(plan, incoming, part, segment, transport)

    mine = sorted(needs[plan.layout.coordinates(rank)[:2]])
    # Ranks that need the same parts begin with different ones.
    turn = ranks.index(rank) * len(mine) // len(ranks)
    order = [parts[number] for number in mine[turn:] + mine[:turn]]
    kept = PartStore(store.pool, plan.digest, parts, users)
    try:
        mapped = kept.obtain(order, rank, receive, wait_seconds)
    except BaseException:
        # What other ranks received must not wait for this one.
        kept.done(rank)
        raise
    leases.append(PartLease(kept, rank, list(mapped.values())))
    return {number: lease.memory for number, lease in mapped.items()}


def _read_part(
    plan: DispatchPlan, incoming: Incoming, part: Part, segment: Segment, transport: Transport
) -> None:
    ranges: dict[str, list[Range]] = {}
    into: dict[str, list[memoryview]] = {}
    proofs: dict[str, Proof] = {}
    chosen = slice(part.first, part.last)
    columns = (incoming.shard, incoming.start, incoming.length, incoming.place - part.base)
    for shard, start, length, place in zip(*(one[chosen].tolist() for one in columns), strict=True):
        entry = plan.entries[shard]
        if entry.file not in proofs:
            proofs[entry.file] = Proof.of(entry)
        item = Range(entry.file, entry.generation, start, length)
        ranges.setdefault(entry.host, []).append(item)
        into.setdefault(entry.host, []).append(segment.memory[place : place + length])
    reads = {host: RemoteRead(ranges[host], into[host]) for host in ranges}
    transport.read_all(reads, proofs)


def _located(
    plan: DispatchPlan,
    name: str,
    wanted: _Wanted,
    shards: Mapping[int, memoryview],
    parts: list[Part],
    received: Mapping[int, memoryview],
) -> Located:
    source = wanted.source
    dtype = np.dtype("uint8" if source.dtype == "string" else source.dtype)
    some = source.length > 0
    start = np.zeros(len(some), dtype=np.int64)
    key = np.full(len(some), -1, dtype=np.int64)
    local = some & ~wanted.remote
    key[local], start[local] = source.shard[local], source.start[local]
    if wanted.remote.any():
        bases = np.array([part.base for part in parts], dtype=np.int64)
        number = np.searchsorted(bases, wanted.place[wanted.remote], "right") - 1
        # Parts follow after the shards in one numbering.
        key[wanted.remote] = len(plan.entries) + number
        start[wanted.remote] = wanted.place[wanted.remote] - bases[number]
    keys, buffer = np.unique(key, return_inverse=True)
    buffers = []
    for one in keys.tolist():
        part = one - len(plan.entries)
        memory = memoryview(b"") if one < 0 else shards[one] if part < 0 else received[part]
        count = memory.nbytes // dtype.itemsize
        buffers.append(
            np.frombuffer(memory, dtype=dtype, count=count) if count else np.empty(0, dtype)
        )
    first = start // dtype.itemsize
    stop = first + source.length // dtype.itemsize
    numbers = buffer.astype(np.int32)
    return Located(tuple(buffers), numbers, first, stop, _kind(plan, name))


def _kind(plan: DispatchPlan, name: str) -> Kind:
    column = next(entry.columns[name] for entry in plan.entries if name in entry.columns)
    if column.dtype == "string":
        return "string"
    return "scalar" if column.axis is None else "list"
