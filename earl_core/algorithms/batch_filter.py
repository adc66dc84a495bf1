"""Which episodes are trained on: of those that did not fail, all whose group has another left."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from earl_core.algorithms.moments import integer_ids


def filter_episodes(group_ids: ArrayLike, *, group_relative: bool) -> NDArray[np.bool_]:
    """Decide which of E episodes to keep, bool [E].

    Args:
        group_ids: Group of each episode, integers [E]; every group is whole.
        group_relative: ``AdvantageEstimator.needs_groups``: a lone episode has nothing to compare
            with, so its group leaves the batch.

    Raises:
        ValueError: Ids that are not integers in one dimension.
    """
    ids = integer_ids(group_ids, np.size(group_ids))
    if not group_relative:
        return np.ones(ids.size, dtype=np.bool_)
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return counts[inverse] > 1
