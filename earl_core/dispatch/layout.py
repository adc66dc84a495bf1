"""Layouts: which rows each consumer rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Consumers of a batch: `data_parallel` ranks that share its rows.

    A row of n tokens costs `linear * n + quadratic * n**2`; attention makes the second part.
    """

    data_parallel: int = 1
    linear: float = 1.0
    quadratic: float = 0.0


def assign_rows(lengths: Sequence[int], groups: Sequence[int], layout: Layout) -> list[np.ndarray]:
    """Row indices of each rank, whole groups together, balanced by predicted cost.

    Longest processing time first over groups; ties go to the lower rank, so the result is a pure
    function of its arguments. Every row appears exactly once.
    """
    lengths_array = np.asarray(lengths, dtype=np.float64)
    cost = layout.linear * lengths_array + layout.quadratic * lengths_array**2
    names, inverse = np.unique(np.asarray(groups), return_inverse=True)
    group_cost = np.bincount(inverse, weights=cost, minlength=len(names))
    loads = np.zeros(layout.data_parallel)
    owner = np.empty(len(names), dtype=np.int64)
    for group in np.argsort(-group_cost, kind="stable"):
        rank = int(np.argmin(loads))
        owner[group] = rank
        loads[rank] += group_cost[group]
    return [np.flatnonzero(owner[inverse] == rank) for rank in range(layout.data_parallel)]
