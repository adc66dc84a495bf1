"""Groups of similar lengths, which one padded call may compute together."""

from __future__ import annotations

import numpy as np


def group_similar(
    sizes: np.ndarray, order: np.ndarray, alone_from: int | None = None
) -> list[np.ndarray]:
    """Cut rows, longest first, into groups that waste at most a quarter on padding.

    sizes: of all rows, int64. order: the rows that are cut, longest first. alone_from: rows of this
    size or more are grouped with equal ones only; None: no row is too long.
    """
    groups: list[np.ndarray] = []
    first = 0
    for index in range(1, order.size + 1):
        longest = int(sizes[order[first]])
        if index < order.size:
            size = int(sizes[order[index]])
            similar = 4 * size >= 3 * longest and (alone_from is None or longest < alone_from)
            if size == longest or similar:
                continue
        groups.append(order[first:index])
        first = index
    return groups
