"""Dispatch plans: which rows each consumer rank reads.

A plan is a pure function of (manifests, layout): no I/O, nothing random, and the order in which
producers are listed changes nothing. Every rank can make it for itself.

    manifests ──join──► rows × columns: shard, start, length
    layout ───assign──► row → replica     (cost, locality, groups)
                            │
          sources_of(rank)       where each row of a rank lies

Rows are balanced by predicted cost, on the host that has them if possible: items (rows, or whole
groups) go by falling cost to the least loaded replica on their own host while that stays under the
bound, the rest to the least loaded replica anywhere. Exchanges between the most and the least
loaded replica repair the balance where it is over the bound. It is never worse than the bound or
plain longest-processing-time-first, whichever is higher. Ties go to the lower item and the lower
replica. A low bound costs bytes between hosts, a high one lets replicas wait for the most loaded:
where it is known how many bytes a link carries meanwhile, it is the one that costs least time.

A worked example: four rows of 5, 3, 4 and 4 tokens, the first two in a shard on host oak, the
others in one on elm, and two consumers, rank 0 on oak and rank 1 on elm. At a cost of 1 a token
both hosts hold 8, so every row stays where it is: `owner` is 0 0 1 1 and `imbalance` 0.
`sources_of(1)` has the rows 2 and 3 and, for `tokens` (int32, from byte 1024 of its file on),
`shard` 1 1, `start` 1024 1040 and `length` 16 16. Were the first row of 13 tokens, both rows of
oak would be too much for rank 0: the second would go to rank 1, which would receive its 12 bytes
from oak.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import xxhash

from earl_core.dispatch.reads.sources import Sources, join
from earl_core.dispatch.shards.manifest import Manifest, ShardEntry

MAX_EXCHANGES_PER_REPLICA = 2

BOUNDS = (0.001, 0.01, 0.06, 0.25)
"""Imbalances that a plan may choose from."""


def assign(
    cost: np.ndarray,
    home: np.ndarray,
    near: Sequence[Sequence[int]],
    replicas: int,
    max_imbalance: float,
) -> np.ndarray:
    """The replica of every item, int64.

    cost: float64 per item, 0 or more. home: int64 per item, the host where it lies, -1 for none.
    near: the replicas of each host. max_imbalance: share of the mean load.
    """
    mean = float(cost.sum()) / replicas
    # Sums of floats in another order differ in their last bits; no bound is meant that exactly.
    cap = mean * (1.0 + max_imbalance) * (1.0 + 1e-12)
    order = np.argsort(-cost, kind="stable")
    owner = _deal(cost, order, home, near, replicas, cap)
    loads = _exchange(cost, owner, replicas, cap)
    if loads.max() > cap:
        plain = _deal(cost, order, np.full(len(cost), -1), near, replicas, cap)
        if _exchange(cost, plain, replicas, cap).max() < loads.max():
            return plain
    return owner


def imbalance(cost: np.ndarray, owner: np.ndarray, part: np.ndarray, replicas: int) -> float:
    """Return the load of the most loaded replica above the mean, as a share of the mean; 0 is even.
    part: int64 per item, from 0; after each part the replicas wait for the most loaded."""
    parts = int(part.max(initial=0)) + 1
    loads = np.bincount(part * replicas + owner, weights=cost, minlength=parts * replicas)
    dearest = float(loads.reshape(parts, replicas).max(axis=1).sum())
    mean = float(cost.sum()) / replicas
    return max(dearest / mean - 1.0, 0.0) if mean > 0 else 0.0


def _deal(
    cost: np.ndarray,
    order: np.ndarray,
    home: np.ndarray,
    near: Sequence[Sequence[int]],
    replicas: int,
    cap: float,
) -> np.ndarray:
    costs, homes = cost.tolist(), home.tolist()
    loads = [0.0] * replicas
    owner = [0] * len(costs)
    heaps = [[(0.0, replica) for replica in sorted(set(some))] for some in near]
    left: list[int] = []
    for item in order.tolist():
        heap = heaps[homes[item]] if homes[item] >= 0 else []
        if not heap:
            left.append(item)
            continue
        # A replica that spans hosts stands in several heaps: its older loads are brought up.
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        load, replica = heap[0]
        if load + costs[item] > cap:
            left.append(item)
            continue
        owner[item] = replica
        loads[replica] = load + costs[item]
        heapq.heapreplace(heap, (loads[replica], replica))
    everywhere = [(load, replica) for replica, load in enumerate(loads)]
    heapq.heapify(everywhere)
    for item in left:
        load, replica = everywhere[0]
        owner[item] = replica
        heapq.heapreplace(everywhere, (load + costs[item], replica))
    return np.array(owner, dtype=np.int64)


def _exchange(cost: np.ndarray, owner: np.ndarray, replicas: int, cap: float) -> np.ndarray:
    """Move or swap items, in place, until no replica exceeds `cap`; returns the loads."""
    loads = np.bincount(owner, weights=cost, minlength=replicas)
    for _ in range(MAX_EXCHANGES_PER_REPLICA * replicas):
        high, low = int(np.argmax(loads)), int(np.argmin(loads))
        gap = loads[high] - loads[low]
        if loads[high] <= cap:
            break
        given = np.flatnonzero(owner == high)
        taken = np.flatnonzero(owner == low)
        taken = taken[np.argsort(cost[taken], kind="stable")]
        # Each given item with the taken one (or none, cost 0) that brings both nearest the middle.
        returns = np.concatenate([[0.0], cost[taken]])
        wanted = cost[given] - gap / 2
        right = np.minimum(np.searchsorted(returns, wanted), len(returns) - 1)
        left = np.maximum(right - 1, 0)
        nearest = np.where(
            np.abs(returns[left] - wanted) <= np.abs(returns[right] - wanted), left, right
        )
        moved = cost[given] - returns[nearest]
        error = np.abs(moved - gap / 2)
        best = int(np.argmin(error))
        # Less than all of the gap must move, or the two only change places.
        if not 1e-9 * gap < moved[best] < gap * (1 - 1e-9):
            break
        owner[given[best]] = low
        if nearest[best]:
            owner[taken[nearest[best] - 1]] = high
        loads[high] -= moved[best]
        loads[low] += moved[best]
    return np.bincount(owner, weights=cost, minlength=replicas)


@dataclass(frozen=True)
class Layout:
    """The consumers of a batch.

    data_parallel replicas share the rows out; the `ranks_per_replica` of a replica (context x
    tensor parallel) read the same rows, whole. Rank number: `replica * ranks_per_replica + k`.

    hosts: the host of each rank; empty means all on the one host of the producers.
    columns: the columns needed; None for all.
    linear, quadratic: a row of n tokens costs `linear * n + quadratic * n**2`; attention makes
    the second part. keep_groups: rows of a group go to one replica. max_imbalance: load that the
    most loaded replica may have above the mean, as a share of the mean, for the sake of rows that
    stay where they are. link_bytes: bytes that the link of a host carries, one way, while a replica
    works off the mean load; above 0, and with consumers on several hosts, the plan chooses the one
    of `BOUNDS` with which the most loaded replica and the busiest link together take least time.

    Raises `ValueError` when the numbers make no layout.
    """

    data_parallel: int = 1
    ranks_per_replica: int = 1
    hosts: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    linear: float = 1.0
    quadratic: float = 0.0
    keep_groups: bool = False
    max_imbalance: float = 0.06
    link_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("data_parallel", "ranks_per_replica"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"a layout's {name} is {getattr(self, name)}: it must be 1 or more"
                )
        for name in ("linear", "quadratic", "max_imbalance", "link_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a layout's {name} is {value}: it must be finite and 0 or more")
        if self.hosts and len(self.hosts) != self.ranks:
            raise ValueError(
                f"a layout of {self.ranks} ranks names {len(self.hosts)} hosts: name the host of "
                "every rank, or none"
            )

    @property
    def ranks(self) -> int:
        """Number of consumer ranks."""
        return self.data_parallel * self.ranks_per_replica

    def replica(self, rank: int) -> int:
        """The replica that a rank belongs to. Raises `IndexError`."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} is not in a layout of {self.ranks} ranks")
        return rank // self.ranks_per_replica

    def cost(self, tokens: np.ndarray) -> np.ndarray:
        """Predicted cost of rows of `tokens` tokens, float64; 1 each where all would be free."""
        counts = tokens.astype(np.float64)
        cost = self.linear * counts + self.quadratic * counts**2
        return cost if cost.any() else np.ones(len(tokens))


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """The rows that each replica reads. Made by `make_plan`.

    owner: int64 per row, its data-parallel replica. hosts: the host of each consumer rank.
    imbalance: load of the most loaded replica above the mean, as a share of the mean.
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
        """int64 sample_ids of a rank's rows, in the order of the batch."""
        return self.sources.rows[self.members(self.layout.replica(rank))]

    def sources_of(self, rank: int) -> Sources:
        """Return the places of the columns of `rows(rank)`."""
        return self.sources.take(self.members(self.layout.replica(rank)))

    def members(self, replica: int) -> np.ndarray:
        """int64 numbers of a replica's rows, ascending."""
        order, first, count = self._by_replica
        return order[first[replica] : first[replica] + count[replica]]

    @cached_property
    def busiest_bytes(self) -> int:
        """The most that any host's link carries one way, received or sent; every byte counts once
        for all ranks of a host."""
        names = sorted({*self.hosts, *(entry.host for entry in self.entries)})
        number = {name: index for index, name in enumerate(names)}
        of_shard = np.array([number[entry.host] for entry in self.entries], dtype=np.int64)
        ranks = enumerate(self.hosts)
        consumers = sorted({(self.layout.replica(rank), number[host]) for rank, host in ranks})
        parts = [self.members(replica) for replica, _ in consumers]
        rows = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        to = np.repeat([host for _, host in consumers], [len(part) for part in parts])
        received, sent = np.zeros(len(names)), np.zeros(len(names))
        for column in self.sources.columns.values():
            source, length = of_shard[column.shard[rows]], column.length[rows]
            away = source != to
            received += np.bincount(to[away], length[away], len(names))
            sent += np.bincount(source[away], length[away], len(names))
        return int(max(received.max(initial=0), sent.max(initial=0)))

    @property
    def waiting(self) -> float:
        """Time that imbalance and the busiest link cost, as a share of the mean load's."""
        return self.imbalance + self.busiest_bytes / self.layout.link_bytes

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
) -> DispatchPlan:
    """`plan_rows` of joined manifests, whose errors it raises too."""
    return plan_rows(join(manifests, layout.columns), layout, groups=groups)


def plan_rows(
    sources: Sources,
    layout: Layout,
    *,
    groups: Sequence[int] | np.ndarray | None = None,
    parts: np.ndarray | None = None,
) -> DispatchPlan:
    """Plan the way of rows to their consumers.

    groups: the group of each row of `sources`, needed when `layout.keep_groups`. parts: for each
    row which part of the work it belongs to, the same for all rows of a group; the replicas meet
    after each part, so each is balanced by itself.
    Raises `ValueError` when the layout cannot be met.
    """
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
    part = np.zeros(len(cost), dtype=np.int64)
    if parts is not None:
        part[item] = np.unique(parts, return_inverse=True)[1]

    def bounded(layout: Layout) -> DispatchPlan:
        owner, replicas = np.empty(len(cost), dtype=np.int64), layout.data_parallel
        for one in np.unique(part):
            chosen = np.flatnonzero(part == one)
            given = cost[chosen], home[chosen]
            owner[chosen] = assign(*given, near, replicas, layout.max_imbalance)
        uneven = imbalance(cost, owner, part, replicas)
        return DispatchPlan(layout, sources, owner[item], hosts, uneven)

    if not layout.link_bytes or len(near) == 1:
        return bounded(layout)
    plans = [bounded(replace(layout, max_imbalance=bound)) for bound in BOUNDS]
    return min(plans, key=lambda plan: plan.waiting)


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
