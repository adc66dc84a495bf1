"""Dispatch plans: which rows each consumer rank reads.

A plan is a pure function of (manifests, layout): no I/O, nothing random, and the order in which
producers are listed changes nothing. Every rank can make it for itself.

    manifests ──join──► rows × columns: shard, start, length
    layout ───assign──► row → replica     (cost, locality, groups)
                            │
          sources_of(rank)       where each row of a rank lies
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from earl_core.dispatch.reads.assignment import assign, imbalance
from earl_core.dispatch.reads.layout import Layout
from earl_core.dispatch.reads.sources import Sources, join
from earl_core.dispatch.shards.manifest import Manifest, ShardEntry


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

    @cached_property
    def digest(self) -> str:
        """xxh3_64 in hex over rows, owners, layout and shards: equal plans have equal digests."""
        columns = tuple(sorted(self.sources.columns))
        shards = [(entry.host, entry.file, entry.generation) for entry in self.entries]
        digest = xxhash.xxh3_64(repr((self.layout, self.hosts, columns, shards)).encode())
        digest.update(self.sources.rows.tobytes())
        digest.update(self.owner.tobytes())
        return digest.hexdigest()

    def rows(self, rank: int) -> np.ndarray:
        """int64 sample_ids of a rank's rows, ascending."""
        return self.sources.rows[self.members(self.layout.replica(rank))]

    def sources_of(self, rank: int) -> Sources:
        """Where the columns of `rows(rank)` lie."""
        return self.sources.take(self.members(self.layout.replica(rank)))

    def members(self, replica: int) -> np.ndarray:
        """int64 numbers of a replica's rows, ascending."""
        order, first, count = self._by_replica
        return order[first[replica] : first[replica] + count[replica]]

    @cached_property
    def _by_replica(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row numbers sorted by replica, and the first and the count of each replica."""
        count = np.bincount(self.owner, minlength=self.layout.data_parallel)
        return np.argsort(self.owner, kind="stable"), np.cumsum(count) - count, count


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
    Raises `ManifestError` when manifests contradict themselves or each other, `ValueError` when the
    layout cannot be met.
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
    near: list[list[int]] = [[] for _ in near_hosts]
    for rank, host in enumerate(hosts):
        near[number[host]].append(layout.replica(rank))
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
