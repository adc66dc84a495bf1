"""Dispatch plans: which bytes each consumer rank reads from which host.

A plan is a pure function of (manifests, layout): no I/O, nothing random, and the order in which
producers are listed changes nothing. Every rank can make it for itself.

    manifests ──join──► rows × columns: shard, start, length
    layout ───assign──► row → replica     (cost, locality, groups)
                            │
          locate(rank, column)   where each row of a rank lies, cut to its tokens
          incoming(host)         what a host reads from others, every byte once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from earl_core.dispatch.reads.assignment import assign, imbalance
from earl_core.dispatch.reads.layout import Layout
from earl_core.dispatch.reads.sources import ColumnSource, Sources, join
from earl_core.dispatch.shards.manifest import Manifest, ShardEntry
from earl_core.dispatch.shards.ranges import Incoming, Range, Read, merge

__all__ = ["DispatchPlan", "Incoming", "Range", "Read", "RowSource", "make_plan"]


@dataclass(frozen=True, eq=False)
class RowSource:
    """Where one column of one rank's rows lies, cut to the rank's tokens.

    shard: int64 per row, index into the plan's `entries`; start, length: int64 per row, bytes
    within the shard's file. dtype as in the manifest; `string` is bytes of UTF-8.
    """

    dtype: str
    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Who reads what. Made by `make_plan`.

    owner: int64 per row, its data-parallel replica. hosts: the host of each consumer rank.
    imbalance: how far the dearest replica lies above the mean, as a share of it.
    """

    layout: Layout
    sources: Sources
    owner: np.ndarray
    hosts: tuple[str, ...]
    imbalance: float

    @property
    def entries(self) -> tuple[ShardEntry, ...]:
        """All shards of the plan; `shard` numbers count these."""
        return self.sources.entries

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are read, sorted."""
        return tuple(sorted(self.sources.columns))

    @cached_property
    def digest(self) -> str:
        """xxh3_64 in hex over rows, owners, layout and shards: equal plans have equal digests."""
        shards = [(entry.host, entry.file, entry.generation) for entry in self.entries]
        digest = xxhash.xxh3_64(repr((self.layout, self.hosts, self.columns, shards)).encode())
        digest.update(self.sources.rows.tobytes())
        digest.update(self.owner.tobytes())
        return digest.hexdigest()

    def rows(self, rank: int) -> np.ndarray:
        """int64 sample_ids of a rank's rows, ascending."""
        return self.sources.rows[self._members(rank)]

    def token_ranges(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(start, stop, padding) in tokens for each of `rows(rank)`, int64."""
        context = self.layout.coordinates(rank)[1]
        return self.layout.token_ranges(self.sources.tokens[self._members(rank)], context)

    def token_range(self, rank: int, row: int) -> tuple[int, int, int]:
        """(start, stop, padding) of the row with this sample_id. Raises `KeyError`."""
        rows = self.rows(rank)
        index = int(np.searchsorted(rows, row))
        if index == len(rows) or rows[index] != row:
            raise KeyError(f"rank {rank} does not have the row {row}")
        start, stop, padding = self.token_ranges(rank)
        return int(start[index]), int(stop[index]), int(padding[index])

    def locate(self, rank: int, column: str) -> RowSource:
        """Where a column of `rows(rank)` lies. Raises `KeyError` for a column not in the plan."""
        source = self.sources.columns[column]
        members = self._members(rank)
        start, length = self._cut(source, members, self.layout.coordinates(rank)[1])
        return RowSource(source.dtype, source.shard[members], start, length)

    def reads(self, rank: int) -> list[Read]:
        """Every piece a rank needs, local ones too, column after column; none of no bytes."""
        found = []
        rows = self.rows(rank).tolist()
        for column in self.columns:
            place = self.locate(rank, column)
            spans = zip(
                rows, place.shard.tolist(), place.start.tolist(), place.length.tolist(), strict=True
            )
            for row, shard, start, length in spans:
                if length:
                    entry = self.entries[shard]
                    where = (entry.host, entry.file, entry.generation)
                    found.append(Read(*where, column, row, start, length))
        return found

    def incoming(self, host: str) -> Incoming:
        """What one consumer host reads from other hosts, each byte once for all its ranks."""
        known = self.__dict__.get("incoming_by_host")
        if known is not None:
            return known.get(host, _nothing())
        if host not in self.hosts:
            return _nothing()
        number = self._host_names.index(host)
        _, shard, start, length = merge(*self._pieces(self._consumers[:, 0] == number))
        return Incoming(shard, start, length)

    @cached_property
    def incoming_by_host(self) -> dict[str, Incoming]:
        """`incoming` of every consumer host."""
        everyone = np.ones(len(self._consumers), dtype=bool)
        host, shard, start, length = merge(*self._pieces(everyone))
        numbers = np.unique(self._consumers[:, 0])
        firsts = np.searchsorted(host, numbers, "left").tolist()
        lasts = np.searchsorted(host, numbers, "right").tolist()
        return {
            self._host_names[number]: Incoming(shard[a:b], start[a:b], length[a:b])
            for number, a, b in zip(numbers.tolist(), firsts, lasts, strict=True)
        }

    def host_reads(self, host: str) -> dict[str, tuple[Range, ...]]:
        """`incoming(host)` by source host; ranges in the order of `incoming(host).place`."""
        incoming = self.incoming(host)
        found: dict[str, list[Range]] = {}
        spans = zip(
            incoming.shard.tolist(), incoming.start.tolist(), incoming.length.tolist(), strict=True
        )
        for shard, start, length in spans:
            entry = self.entries[shard]
            ranges = found.setdefault(entry.host, [])
            ranges.append(Range(entry.file, entry.generation, start, length))
        return {source: tuple(ranges) for source, ranges in found.items()}

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that cross the network."""
        return sum(incoming.moved_bytes for incoming in self.incoming_by_host.values())

    @cached_property
    def needed_bytes(self) -> int:
        """Bytes that consumer hosts need, each counted once per host, local ones too."""
        total = 0
        for source in self.sources.columns.values():
            per_row = self._expanded(source.per_token, np.ones(len(self._consumers), dtype=bool))
            rows, consumer = per_row
            _, length = self._cut(source, rows, self._consumers[consumer, 2])
            total += int(length.sum())
        return total

    @property
    def local_share(self) -> float:
        """Share of the needed bytes that already lie on the host that needs them."""
        needed = self.needed_bytes
        return 1.0 - self.moved_bytes / needed if needed else 1.0

    @cached_property
    def _by_replica(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row numbers sorted by replica, and the first and the count of each replica."""
        count = np.bincount(self.owner, minlength=self.layout.data_parallel)
        return np.argsort(self.owner, kind="stable"), np.cumsum(count) - count, count

    def _members(self, rank: int) -> np.ndarray:
        order, first, count = self._by_replica
        replica = self.layout.coordinates(rank)[0]
        return order[first[replica] : first[replica] + count[replica]]

    @cached_property
    def _host_names(self) -> tuple[str, ...]:
        return tuple(sorted({*self.hosts, *(entry.host for entry in self.entries)}))

    @cached_property
    def _host_of_shard(self) -> np.ndarray:
        numbers = {name: number for number, name in enumerate(self._host_names)}
        return np.array([numbers[entry.host] for entry in self.entries], dtype=np.int64)

    @cached_property
    def _consumers(self) -> np.ndarray:
        """Distinct (host, data, context) of the ranks: tensor-parallel ones need the same bytes."""
        layout = self.layout
        numbers = {name: number for number, name in enumerate(self._host_names)}
        host = np.array([numbers[name] for name in self.hosts], dtype=np.int64)
        replica = np.arange(layout.ranks) // layout.tensor_parallel
        data, context = np.divmod(replica, layout.context_parallel)
        return np.unique(np.stack([host, data, context], axis=1), axis=0)

    def _expanded(self, per_token: bool, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every (row, consumer) pair of the chosen consumers; whole rows once per host."""
        numbers = np.flatnonzero(chosen)
        if not per_token:
            # Context ranks of a host and replica share what is not cut by tokens.
            pairs = self._consumers[numbers, :2]
            numbers = numbers[np.unique(pairs, axis=0, return_index=True)[1]]
        order, first, count = self._by_replica
        replicas = self._consumers[numbers, 1]
        times = count[replicas]
        ends = np.cumsum(times)
        within = np.arange(int(times.sum())) - np.repeat(ends - times, times)
        return order[np.repeat(first[replicas], times) + within], np.repeat(numbers, times)

    def _cut(
        self, source: ColumnSource, rows: np.ndarray, context: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(start, length) in bytes of what context ranks need of a column's rows."""
        if not source.per_token or self.layout.context_parallel == 1:
            return source.start[rows], source.length[rows]
        begin, end, _ = self.layout.token_ranges(self.sources.tokens[rows], context)
        return source.start[rows] + begin * source.itemsize, (end - begin) * source.itemsize

    def _pieces(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(host, shard, start, length) of all the chosen consumers read from other hosts."""
        remote: dict[tuple[int, bool], tuple[np.ndarray, ...]] = {}
        parts = []
        for source in self.sources.columns.values():
            key = (source.manifest, source.per_token)
            if key not in remote:
                rows, consumer = self._expanded(source.per_token, chosen)
                host, shard = self._consumers[consumer, 0], source.shard[rows]
                away = self._host_of_shard[shard] != host
                context = self._consumers[consumer, 2]
                remote[key] = (rows[away], context[away], host[away], shard[away])
            rows, context, host, shard = remote[key]
            start, length = self._cut(source, rows, context)
            some = length > 0
            if not some.all():
                parts.append((host[some], shard[some], start[some], length[some]))
            else:
                parts.append((host, shard, start, length))
        if not parts:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, empty, empty
        host, shard, start, length = (np.concatenate(column) for column in zip(*parts, strict=True))
        return host, shard, start, length


def make_plan(
    manifests: Sequence[Manifest],
    layout: Layout,
    *,
    groups: Sequence[int] | np.ndarray | None = None,
    parts: Sequence[int] | np.ndarray | None = None,
) -> DispatchPlan:
    """Plan the way of a batch to its consumers.

    The rows of the last manifest decide; its columns and those of the manifests before it are
    joined by sample_id. groups: the group of each row in ascending order of sample_id, needed
    when `layout.keep_groups`. parts: for each row which part of the work it belongs to, the same
    for all rows of a group; the replicas meet after each part, so each is balanced by itself.
    Raises `ManifestError` when manifests contradict themselves or
    each other, `ValueError` when the layout cannot be met.
    """
    sources = join(manifests, layout.columns)
    hosts = layout.hosts or _only_host(sources, layout.ranks)
    cost = layout.cost(sources.tokens)
    item = np.arange(len(cost))
    if layout.keep_groups:
        if groups is None or len(groups) != len(cost):
            raise ValueError(
                f"to keep groups together a plan needs the group of each of its {len(cost)} rows"
            )
        _, item = np.unique(np.asarray(groups), return_inverse=True)
        cost = np.bincount(item, weights=cost)
    near_hosts = sorted(set(hosts))
    number = {name: index for index, name in enumerate(near_hosts)}
    per_replica = layout.context_parallel * layout.tensor_parallel
    near: list[list[int]] = [[] for _ in near_hosts]
    for rank, host in enumerate(hosts):
        near[number[host]].append(rank // per_replica)
    home = _homes(sources, item, len(cost), number)
    part = _parts(item, len(cost), parts)
    owner = np.empty(len(cost), dtype=np.int64)
    for one in np.unique(part):
        chosen = np.flatnonzero(part == one)
        owner[chosen] = assign(
            cost[chosen], home[chosen], near, layout.data_parallel, layout.max_imbalance
        )
    uneven = imbalance(cost, owner, part, layout.data_parallel)
    return DispatchPlan(layout, sources, owner[item], hosts, uneven)


def _parts(item: np.ndarray, items: int, parts: Sequence[int] | np.ndarray | None) -> np.ndarray:
    """The part of each item, int64, counted from 0. item: the item of each row."""
    found = np.zeros(items, dtype=np.int64)
    if parts is not None:
        found[item] = np.unique(np.asarray(parts), return_inverse=True)[1]
    return found


def _only_host(sources: Sources, ranks: int) -> tuple[str, ...]:
    found = sorted({entry.host for entry in sources.entries})
    if len(found) > 1:
        raise ValueError(
            f"the shards lie on {found}: name the host of every consumer rank in Layout.hosts"
        )
    return (found[0] if found else "",) * ranks


def _homes(sources: Sources, item: np.ndarray, items: int, number: dict[str, int]) -> np.ndarray:
    """The consumer host that holds most bytes of each item, -1 where none holds any; int64."""
    host_of_shard = np.array([number.get(e.host, -1) for e in sources.entries], dtype=np.int64)
    weights: dict[int, np.ndarray] = {}
    shards: dict[int, np.ndarray] = {}
    for source in sources.columns.values():
        shards[source.manifest] = source.shard
        weights[source.manifest] = weights.get(source.manifest, 0) + source.length
    home = np.full(items, -1, dtype=np.int64)
    if not shards or not items:
        return home
    host = np.concatenate([host_of_shard[shards[manifest]] for manifest in shards])
    weight = np.concatenate([weights[manifest] for manifest in shards])
    key = np.tile(item, len(shards)) * len(number) + host
    here = host >= 0
    keys, inverse = np.unique(key[here], return_inverse=True)
    held = np.bincount(inverse, weights=weight[here])
    # The last write wins: most bytes, and of equals the first host by name.
    order = np.lexsort((-keys, held))
    home[keys[order] // len(number)] = keys[order] % len(number)
    return home


def _nothing() -> Incoming:
    empty = np.empty(0, dtype=np.int64)
    return Incoming(empty, empty, empty)
