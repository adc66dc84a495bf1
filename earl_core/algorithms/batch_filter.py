"""Which episodes are trained on: failed ones leave their group, too small groups the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from earl_core.algorithms.moments import Int64Array, integer_ids


@dataclass(frozen=True, slots=True)
class FilterResult:
    """What :func:`filter_episodes` keeps and why not the rest.

    Attributes:
        keep: bool [E], True for the episodes to train on.
        failed_episodes: How many had failed.
        dropped_groups: Ids of groups with fewer than two episodes left, int64 ascending; a set
            union over ranks counts each once. Empty if the estimator is not group-relative.
        dropped_episodes: How many sound episodes left with their group.
    """

    keep: NDArray[np.bool_]
    failed_episodes: int
    dropped_groups: Int64Array
    dropped_episodes: int

    def metrics(self) -> dict[str, float]:
        """The counts as metrics."""
        return {
            "episodes_kept": float(self.keep.sum()),
            "episodes_failed": float(self.failed_episodes),
            "groups_dropped": float(self.dropped_groups.size),
            "episodes_dropped_with_group": float(self.dropped_episodes),
        }


def filter_episodes(
    group_ids: ArrayLike,
    failed: ArrayLike,
    *,
    group_relative: bool,
    sound_in_group: ArrayLike | None = None,
) -> FilterResult:
    """Decide which of E episodes to keep.

    Args:
        group_ids: Group of each episode, integers [E].
        failed: Whether each episode failed, bool [E].
        group_relative: ``AdvantageEstimator.needs_groups``: a lone episode has nothing to compare
            with.
        sound_in_group: Unfailed episodes of each episode's group over all ranks, [E]; None if
            every group is wholly here.

    Raises:
        ValueError: Shapes that do not fit together.
    """
    failures = np.asarray(failed, dtype=np.bool_)
    if failures.ndim != 1:
        raise ValueError(
            f"The failed flags must be one-dimensional, not of shape {failures.shape}."
        )
    ids = integer_ids(group_ids, failures.size)
    sound = ~failures
    if not group_relative:
        return FilterResult(sound, int(failures.sum()), np.empty(0, dtype=np.int64), 0)
    if sound_in_group is None:
        unique, inverse = np.unique(ids, return_inverse=True)
        alive = np.bincount(inverse[sound], minlength=unique.size)[inverse]
    else:
        alive = np.asarray(sound_in_group, dtype=np.int64)
        if alive.shape != ids.shape:
            raise ValueError("Give the number of sound episodes of its group for every episode.")
    lonely = alive < 2
    return FilterResult(
        keep=sound & ~lonely,
        failed_episodes=int(failures.sum()),
        dropped_groups=np.unique(ids[lonely]),
        dropped_episodes=int((sound & lonely).sum()),
    )
