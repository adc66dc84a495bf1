"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438) over time steps.

Time steps are trained tokens, or turns; what the environment said between them is no step, so that
the successor of a step is the episode's next one, in whatever sample it stands:

    d_t = r_t + gamma * V_{t+1} - V_t      A_t = d_t + gamma * lambda * A_{t+1}

After an episode's last step there is nothing: V = A = 0, however it ended. All numbers are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from earl_core.algorithms.moments import Float64Array, Int64Array
from earl_core.algorithms.turns import Turns


@dataclass(frozen=True, slots=True)
class Steps:
    """N time steps, episode after episode, each in the order of time.

    rewards, values: [N]. episodes: index of each one's episode, not falling, [N]. token_counts:
    trained tokens of each, at least 1, [N].
    """

    rewards: Float64Array
    values: Float64Array
    episodes: Int64Array
    token_counts: Int64Array

    @classmethod
    def of_tokens(cls, turns: Turns, penalties: Float64Array | None, values: Float64Array) -> Steps:
        """Make each of the turns' T trained tokens a step. A turn's reward comes with its last
        token, penalties with their own. penalties, values: [T]."""
        counts = turns.token_counts
        rewards: Float64Array = np.zeros(len(values))
        rewards -= 0.0 if penalties is None else penalties
        first, of_token = _first_tokens(turns), np.repeat(turns.episodes, counts)
        # A turn without a token pays the one before it, whose consequence it is.
        last = np.cumsum(counts) - 1
        paid = last >= first
        np.add.at(rewards, last[paid], turns.rewards[paid])
        return cls(rewards, values, of_token, np.ones(len(values), np.int64))

    @classmethod
    def of_turns(cls, turns: Turns, penalties: Float64Array | None, values: Float64Array) -> Steps:
        """Make each turn with a trained token a step, whose value is that of its first one. It pays
        the penalties of its tokens; penalties, values: of the turns' trained tokens, [T]."""
        counts, rewards = turns.token_counts, turns.less(penalties).rewards
        acts = counts > 0
        actor = np.maximum.accumulate(np.where(acts, np.arange(len(counts)), -1))
        paid = (actor >= 0) & (turns.episodes == turns.episodes[actor])
        summed: Float64Array = np.zeros(len(counts))
        np.add.at(summed, actor[paid], rewards[paid])
        starts = (np.cumsum(counts) - counts)[acts]
        return cls(summed[acts], values[starts], turns.episodes[acts], counts[acts])

    def advantages(self, gamma: float, lam: float) -> Float64Array:
        """Return A_t of each step, [N]."""
        found = self.rewards - self.values
        sizes = np.bincount(self.episodes, minlength=1)
        ends = np.cumsum(sizes)
        order = np.argsort(-sizes, kind="stable")
        sizes, ends = sizes[order], ends[order]
        # From the ends backwards, a step of all episodes that have one at a time.
        for back in range(2, int(sizes[0]) + 1 if len(self.values) else 0):
            at = ends[: np.searchsorted(-sizes, -back, side="right")] - back
            found[at] += gamma * (self.values[at + 1] + lam * found[at + 1])
        return found


def _first_tokens(turns: Turns) -> Int64Array:
    """The first trained token of each turn's episode, as an index into those of all turns."""
    sizes = np.bincount(turns.episodes, turns.token_counts, minlength=1).astype(np.int64)
    return np.asarray((np.cumsum(sizes) - sizes)[turns.episodes], np.int64)
