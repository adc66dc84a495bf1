"""Advantages of a whole batch in one place: what any split over ranks must give."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from earl_core.algorithms.advantage_batch import Episodes, batch_moments, token_advantages
from earl_core.algorithms.advantages import AdvantageEstimator
from earl_core.algorithms.turns import Turns


def compute_advantages(
    estimator: AdvantageEstimator,
    rewards: ArrayLike,
    group_ids: ArrayLike,
    token_counts: ArrayLike,
    token_penalties: ArrayLike | None = None,
    turns: Turns | None = None,
) -> NDArray[np.float64]:
    """The advantage of every trained token, float64 [T], computed in one place.

    Args:
        estimator: Built by ``ADVANTAGE_ESTIMATORS``.
        rewards: Reward of each episode, [E].
        group_ids: Group of each episode, integers [E].
        token_counts: Trained tokens of each episode, [E].
        token_penalties: Taken off the reward at each trained token, [T]; None for no penalty.
        turns: For a turn-level estimator.

    Raises:
        ValueError: Shapes that do not fit together, or numbers that are not finite.
    """
    episodes = Episodes.checked(rewards, group_ids, token_counts, token_penalties, turns)
    return token_advantages(estimator, episodes, batch_moments(estimator, episodes))
