"""The reward stage: one reward per episode, from the rewards of its turns."""

from __future__ import annotations

import numpy as np

from earl_core.cluster.rpc import Rule
from earl_core.dispatch.reads.batch import Batch
from earl_core.run.worker import READ_RULES
from earl_core.trajectory.samples import Rows

REWARD_RULES: dict[str, Rule] = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "seconds": "max",
    **READ_RULES,
}
"""How the metrics of several ranks become one; their weight is their number of episodes."""


def reward_rows(batch: Batch) -> tuple[Rows, dict[str, float], int]:
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
    rows = Rows({"sample_id": batch.rows, "reward": totals[inverse]})
    return rows, metrics, len(episodes)
