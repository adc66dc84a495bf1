"""Advantages of the trained tokens of a batch, computed from the rewards of its episodes.

Each rank calls :func:`batch_moments` on its episodes, all merge the moments in one order, and each
calls :func:`token_advantages` on its episodes, which hold every group whole. One rank that has all
episodes is the special case without a merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from earl_core.algorithms.advantages import AdvantageEstimator
from earl_core.algorithms.moments import (
    Float64Array,
    Int64Array,
    Moments,
    finite_float64,
    group_moments,
    integer_ids,
)
from earl_core.algorithms.turns import Turns


def filter_episodes(group_ids: ArrayLike, *, group_relative: bool) -> NDArray[np.bool_]:
    """Choose the episodes that are trained on, of E: bool [E].

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


@dataclass(frozen=True, slots=True)
class Episodes:
    """E episodes that are trained on, with T trained tokens, flat: episode after episode and within
    an episode in the order of time, whatever samples they stand in.

    rewards: [E]. group_ids: integers [E]. token_counts: of trained tokens, [E], sum T. penalties:
    what is taken off the reward at each token, [T]: the KL coefficient times the KL estimate; None
    for nothing. turns: for a turn-level estimator. values: a critic's, before each token, [T]; for
    an estimator that needs them.
    """

    rewards: Float64Array
    group_ids: Int64Array
    token_counts: Int64Array
    penalties: Float64Array | None
    turns: Turns | None = None
    values: Float64Array | None = None

    @classmethod
    def checked(
        cls,
        rewards: ArrayLike,
        group_ids: ArrayLike,
        token_counts: ArrayLike,
        token_penalties: ArrayLike | None = None,
        turns: Turns | None = None,
        token_values: ArrayLike | None = None,
    ) -> Episodes:
        """Raises ValueError for shapes that do not fit together, or numbers that are not finite."""
        numbers = finite_float64(rewards, "rewards")
        ids = integer_ids(group_ids, numbers.size)
        counts = np.asarray(token_counts, dtype=np.int64)
        if counts.shape != numbers.shape or (counts < 0).any():
            raise ValueError(
                f"The token counts must be {numbers.size} non-negative integers, one an episode, "
                f"not of shape {counts.shape}."
            )
        total = int(counts.sum())
        penalties = _of_tokens(token_penalties, "penalties", total)
        values = _of_tokens(token_values, "values", total)
        if turns is not None:
            told = np.bincount(turns.episodes, turns.token_counts, minlength=numbers.size)
            if not np.array_equal(told, counts):
                raise ValueError("The turns' trained tokens must be those of their episodes.")
        return cls(numbers, ids, counts, penalties, turns, values)

    def episode_returns(self) -> Float64Array:
        """Reward less all penalties of the episode, [E]."""
        if self.penalties is None:
            return self.rewards
        episode = np.repeat(np.arange(self.rewards.size), self.token_counts)
        return self.rewards - np.bincount(
            episode, weights=self.penalties, minlength=self.rewards.size
        )

    def token_returns(self, turn_returns: Float64Array | None = None) -> Float64Array:
        """Reward, or return of the turn, less the penalties from each token to its episode's end,
        [T]."""
        if self.turns is None or turn_returns is None:
            returns = np.repeat(self.rewards, self.token_counts)
        else:
            returns = np.repeat(turn_returns, self.turns.token_counts)
        if self.penalties is None:
            return returns
        ends = np.cumsum(self.token_counts)
        # Episode by episode, not as differences of one long sum: an episode's rounding then
        # does not depend on which other episodes are in the batch.
        for start, end in zip(ends - self.token_counts, ends, strict=True):
            returns[start:end] -= np.cumsum(self.penalties[start:end][::-1])[::-1]
        return returns


def _of_tokens(given: ArrayLike | None, what: str, tokens: int) -> Float64Array | None:
    if given is None:
        return None
    numbers = finite_float64(given, f"token {what}")
    if numbers.size != tokens:
        raise ValueError(
            f"There are {numbers.size} {what} for {tokens} trained tokens; give one for each "
            "trained token."
        )
    return numbers


def batch_moments(estimator: AdvantageEstimator, episodes: Episodes) -> Moments | None:
    """The moments of these episodes alone; None if the estimator needs none of the batch.

    Failed episodes must have been left out before, and each is counted whole by exactly one rank.
    """
    if not estimator.needs_batch:
        return None
    if estimator.needs_values:
        return Moments.from_values(_relative_returns(estimator, episodes))
    if not estimator.token_level:
        return Moments.from_values(episodes.episode_returns())
    of_turns = _turn_returns(estimator, episodes)
    if of_turns is None and episodes.penalties is None:
        return Moments.from_values(episodes.rewards, frequencies=episodes.token_counts)
    return Moments.from_values(episodes.token_returns(of_turns))


def token_advantages(
    estimator: AdvantageEstimator, episodes: Episodes, batch: Moments | None
) -> Float64Array:
    """The advantage of every trained token of these episodes, float64 [T].

    batch: the moments of the whole batch. The moments of the groups are over the episodes' returns.
    """
    if estimator.needs_values:
        return estimator.advantages(_relative_returns(estimator, episodes), None, batch)
    turns, of_turns = episodes.turns, _turn_returns(estimator, episodes)
    per_token = estimator.token_level and (of_turns is not None or episodes.penalties is not None)
    returns = whole = episodes.episode_returns()
    if turns is not None and of_turns is not None:
        whole = returns - episodes.rewards + turns.firsts(of_turns, len(whole))
    groups = None
    if estimator.needs_groups:
        groups, own = group_moments(whole, episodes.group_ids), whole
        if per_token:
            groups = groups.take(np.repeat(np.arange(len(whole)), episodes.token_counts))
            own = episodes.token_returns(None if turns is None else estimator.turn_parts(turns))
        if estimator.leaves_out:
            groups = groups.without(own)
    if per_token:
        return estimator.advantages(episodes.token_returns(of_turns), groups, batch)
    spread = np.repeat(estimator.advantages(returns, groups, batch), episodes.token_counts)
    if turns is None:
        return spread
    terms = estimator.turn_terms(turns.less(episodes.penalties))
    return spread + np.repeat(terms, turns.token_counts)


def _turn_returns(estimator: AdvantageEstimator, episodes: Episodes) -> Float64Array | None:
    """Return of each turn, where tokens have the returns of their turns; None elsewhere."""
    if episodes.turns is None or not estimator.token_level:
        return None
    return estimator.turn_returns(episodes.turns)


def _relative_returns(estimator: AdvantageEstimator, episodes: Episodes) -> Float64Array:
    """Return of each trained token less its value, [T]."""
    if episodes.values is None or episodes.turns is None:
        raise ValueError("This advantage estimator compares with values of tokens; pass them.")
    return estimator.relative_returns(episodes.turns, episodes.penalties, episodes.values)
