"""From manifests to training samples: views into shared memory, joined by row."""

from __future__ import annotations

from earl_core.dispatch import Batch
from earl_core.learner.packing import TrainingSample

_OPTIONAL = ("advantages", "reference_logprobs", "old_logprobs")


def training_samples(batch: Batch) -> list[TrainingSample]:
    """One `TrainingSample` per row; its arrays are read-only views that must go before the batch.

    Columns that no manifest of the batch has are None.
    """
    there = set(batch.names())
    episodes = batch.scalars("episode_id")
    groups = batch.scalars("group_id")
    return [
        TrainingSample(
            tokens=batch.row("tokens", row),
            loss_mask=batch.row("loss_mask", row),
            rollout_logprobs=batch.row("rollout_logprobs", row),
            episode_id=int(episodes[row]),
            group_id=int(groups[row]),
            sample_id=int(batch.rows[row]),
            **{name: batch.row(name, row) if name in there else None for name in _OPTIONAL},
        )
        for row in range(len(batch))
    ]
