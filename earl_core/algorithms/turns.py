"""The turns of a batch's episodes, for advantages that differ within an episode."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from earl_core.algorithms.moments import Float64Array, Int64Array, finite_float64


@dataclass(frozen=True, slots=True)
class Turns:
    """N turns, episode after episode, each in the order of time, whatever samples they stand in.

    rewards: [N]. episodes: index of each one's episode, not falling, [N]. token_counts: trained
    tokens, [N]. anchors: integers [N], equal where the same was observed in the same group.
    """

    rewards: Float64Array
    episodes: Int64Array
    token_counts: Int64Array
    anchors: Int64Array

    @classmethod
    def checked(
        cls,
        rewards: ArrayLike,
        episodes: ArrayLike,
        token_counts: ArrayLike,
        anchors: Sequence[Hashable],
    ) -> Turns:
        """anchors: what tells the turns apart. Raises ValueError for lengths that differ, or
        numbers that are not finite."""
        numbers = finite_float64(rewards, "the turns' rewards")
        index = np.asarray(episodes, dtype=np.int64)
        counts = np.asarray(token_counts, dtype=np.int64)
        if not numbers.size == index.size == counts.size == len(anchors):
            raise ValueError(
                f"{numbers.size} rewards, {index.size} episodes, {counts.size} token counts and "
                f"{len(anchors)} anchors do not fit together: give one of each for each turn."
            )
        if (np.diff(index) < 0).any():
            raise ValueError("The turns of an episode must be neighbours: sort them by episode.")
        known: dict[Hashable, int] = {}
        numbered = [known.setdefault(anchor, len(known)) for anchor in anchors]
        return cls(numbers, index, counts, np.array(numbered, dtype=np.int64))

    def less(self, penalties: Float64Array | None) -> Turns:
        """The same turns, whose rewards pay the penalties of their trained tokens, [T]."""
        if penalties is None:
            return self
        turn = np.repeat(np.arange(len(self.rewards)), self.token_counts)
        paid = np.bincount(turn, weights=penalties, minlength=len(self.rewards))
        return replace(self, rewards=self.rewards - paid)

    @property
    def anchored(self) -> int:
        """Turns whose observation another turn of the group answered, too."""
        _, counts = np.unique(self.anchors, return_counts=True)
        return int(counts[counts > 1].sum())

    def returns(self, discount: float) -> Float64Array:
        """Discounted return to go, G_t = r_t + discount * G_{t+1}, [N]."""
        returns = self.rewards.copy()
        for turn in range(len(returns) - 2, -1, -1):
            if self.episodes[turn] == self.episodes[turn + 1]:
                returns[turn] += discount * returns[turn + 1]
        return returns

    @property
    def places(self) -> Int64Array:
        """Count the turns of the same episode that came before each turn, [N]."""
        _, first, inverse = np.unique(self.episodes, return_index=True, return_inverse=True)
        return np.arange(len(self.episodes)) - first[inverse]

    def firsts(self, values: Float64Array, episodes: int) -> Float64Array:
        """Take the value of each episode's first turn out of [N] values, [E]; 0 without a turn."""
        first = np.zeros(episodes)
        index, at = np.unique(self.episodes, return_index=True)
        first[index] = values[at]
        return first
