"""From the rewards of a batch of episodes to the advantages of its trained tokens.

Each rank calls :func:`local_statistics` on its episodes, which hold every group whole, all merge
the moments of the batch in one order, each calls :func:`apply_statistics` on its episodes. One rank
that has all episodes is the special case without a merge.

Layout: E episodes; T trained tokens, flat, episode after episode and within an episode in the
    order they were sampled, over all its samples. ``token_counts`` int64 [E] sums to T.
    ``token_penalties`` float64 [T] is what is taken off the reward at each token: the KL
    coefficient times the KL estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from earl_core.algorithms.advantages import AdvantageEstimator
from earl_core.algorithms.moments import (
    Float64Array,
    GroupedMoments,
    Int64Array,
    Moments,
    finite_float64,
    integer_ids,
)


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """``groups``: moments of the rank's own groups; ``batch``: of its episodes, or of all ranks'
    together. Each is None if not needed."""

    groups: GroupedMoments | None
    batch: Moments | None


def local_statistics(
    estimator: AdvantageEstimator,
    rewards: ArrayLike,
    group_ids: ArrayLike,
    token_counts: ArrayLike,
    token_penalties: ArrayLike | None = None,
) -> BatchStatistics:
    """The statistics of these episodes alone. Failed ones must have been filtered out before.

    Args:
        estimator: Built by ``ADVANTAGE_ESTIMATORS``.
        rewards: Reward of each episode, [E].
        group_ids: Group of each episode, integers [E].
        token_counts: Trained tokens of each episode, [E].
        token_penalties: Taken off the reward at each trained token, [T]; None for no penalty.

    Raises:
        ValueError: Shapes that do not fit together, or numbers that are not finite.

    Each episode must be counted by exactly one rank, whole, and so must each group whose moments
    are needed. Group moments are over the episodes' returns; for a token-level estimator over their
    plain rewards.
    """
    episodes = _Episodes.checked(rewards, group_ids, token_counts, token_penalties)
    batch: Moments | None = None
    if estimator.needs_batch:
        if not estimator.token_level:
            batch = Moments.from_values(episodes.episode_returns())
        elif episodes.penalties is None:
            batch = Moments.from_values(episodes.rewards, frequencies=episodes.token_counts)
        else:
            batch = Moments.from_values(episodes.token_returns())
    groups: GroupedMoments | None = None
    if estimator.needs_groups:
        values = episodes.rewards if estimator.token_level else episodes.episode_returns()
        groups = GroupedMoments.from_values(values, episodes.group_ids)
    return BatchStatistics(groups, batch)


def apply_statistics(
    estimator: AdvantageEstimator,
    statistics: BatchStatistics,
    rewards: ArrayLike,
    group_ids: ArrayLike,
    token_counts: ArrayLike,
    token_penalties: ArrayLike | None = None,
) -> Float64Array:
    """The advantage of every trained token of these episodes, float64 [T], given the moments of
    their groups and of the whole batch; other arguments and errors as in
    :func:`local_statistics`."""
    episodes = _Episodes.checked(rewards, group_ids, token_counts, token_penalties)
    per_token = estimator.token_level and episodes.penalties is not None
    returns = episodes.token_returns() if per_token else episodes.episode_returns()
    groups = None
    if statistics.groups is not None:
        ids = episodes.group_ids
        groups = statistics.groups.at(np.repeat(ids, episodes.token_counts) if per_token else ids)
    values = estimator.advantages(returns, groups, statistics.batch)
    return values if per_token else np.repeat(values, episodes.token_counts)


@dataclass(frozen=True, slots=True)
class _Episodes:
    """Checked inputs in the layout of the module docstring."""

    rewards: Float64Array
    group_ids: Int64Array
    token_counts: Int64Array
    penalties: Float64Array | None

    @classmethod
    def checked(
        cls,
        rewards: ArrayLike,
        group_ids: ArrayLike,
        token_counts: ArrayLike,
        token_penalties: ArrayLike | None,
    ) -> _Episodes:
        numbers = finite_float64(rewards, "rewards")
        ids = integer_ids(group_ids, numbers.size)
        counts = np.asarray(token_counts, dtype=np.int64)
        if counts.shape != numbers.shape or (counts < 0).any():
            raise ValueError(
                f"The token counts must be {numbers.size} non-negative integers, one an episode, "
                f"not of shape {counts.shape}."
            )
        penalties = None
        if token_penalties is not None:
            penalties = finite_float64(token_penalties, "token penalties")
            if penalties.size != counts.sum():
                raise ValueError(
                    f"There are {penalties.size} penalties for {counts.sum()} trained tokens; "
                    "give one for each trained token."
                )
        return cls(numbers, ids, counts, penalties)

    def episode_returns(self) -> Float64Array:
        """Reward less all penalties of the episode, [E]."""
        if self.penalties is None:
            return self.rewards
        episode = np.repeat(np.arange(self.rewards.size), self.token_counts)
        return self.rewards - np.bincount(
            episode, weights=self.penalties, minlength=self.rewards.size
        )

    def token_returns(self) -> Float64Array:
        """Reward less the penalties from each token to its episode's end, [T]."""
        returns = np.repeat(self.rewards, self.token_counts)
        if self.penalties is None:
            return returns
        ends = np.cumsum(self.token_counts)
        # Episode by episode, not as differences of one long sum: an episode's rounding then
        # does not depend on which other episodes are in the batch.
        for start, end in zip(ends - self.token_counts, ends, strict=True):
            returns[start:end] -= np.cumsum(self.penalties[start:end][::-1])[::-1]
        return returns
