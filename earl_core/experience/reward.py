"""The reward stage: one reward per episode, from the rewards of its turns."""

from __future__ import annotations

import numpy as np

from earl_core.cluster.results import Rule
from earl_core.dispatch.reads.batch import Batch
from earl_core.trajectory.samples import ColumnTarget

REWARD_RULES: dict[str, Rule] = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "seconds": "max",
}
"""How the metrics of several ranks become one; their weight is their number of episodes."""


class RewardRows:
    """Rows of `REWARD_SCHEMA`. sample_ids: int64 [rows], ascending. rewards: float [rows]."""

    def __init__(self, sample_ids: np.ndarray, rewards: np.ndarray) -> None:
        self.lengths: dict[str, np.ndarray] = {}
        self.strings: dict[str, list[str]] = {}
        self._columns = {"sample_id": sample_ids, "reward": rewards}

    def __len__(self) -> int:
        return len(self._columns["sample_id"])

    def fill(self, target: ColumnTarget) -> None:
        """Write both columns."""
        for name, values in self._columns.items():
            target.values(name)[:] = values


def reward_rows(batch: Batch) -> tuple[RewardRows, dict[str, float], int]:
    """Rows of `REWARD_SCHEMA`, metrics, and the number of episodes they are over.

    An episode's reward is the sum of its turns' rewards over all its samples, float64 before it
    is stored as float32; each of the episode's samples carries it. The batch holds all samples of
    its episodes, at least one.
    """
    episodes, inverse = np.unique(batch.scalars("episode_id"), return_inverse=True)
    per_sample = np.array(
        [batch.row("turn_rewards", index).sum(dtype=np.float64) for index in range(len(batch))]
    )
    totals = np.bincount(inverse, weights=per_sample, minlength=len(episodes))
    metrics = {
        "mean": float(totals.mean()),
        "std": float(totals.std()),
        "min": float(totals.min()),
        "max": float(totals.max()),
    }
    return RewardRows(batch.rows, totals[inverse]), metrics, len(episodes)
