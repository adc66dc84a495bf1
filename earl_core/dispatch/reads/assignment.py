"""Dealing rows out to replicas: balanced by predicted cost, on the host that has them if possible.

Items (rows, or whole groups) go dearest first to the least loaded replica on their own host
while that stays under the bound; the rest go to the least loaded replica anywhere. Exchanges
between the dearest and the cheapest replica repair what is left over the bound. Never worse
balanced than the bound or plain longest-processing-time-first, whichever is higher. Ties go to
the lower item and the lower replica, so the result is a pure function of its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

MAX_EXCHANGES_PER_REPLICA = 2


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
    """How far the dearest replica lies above the mean, as a share of it; 0 is even.

    part: int64 per item, from 0; after each part the replicas wait for the dearest.
    """
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
