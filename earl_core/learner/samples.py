"""Between shards and training samples: views into shared memory, joined by row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from earl_core.dispatch import Batch, ShardEntry, ShardStore
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


def write_scores(
    store: ShardStore,
    batch: Batch,
    score: Callable[[list[TrainingSample], list[np.ndarray]], object],
    *,
    stage: str,
    iteration: int,
    rank: int,
    schema: pa.Schema,
) -> ShardEntry:
    """Publish one float32 per token of each row of the batch; returns the completed entry.

    schema: `sample_id` and one token column. score(samples, arrays) writes every element of the
    arrays, one [L] per sample; they lie in the shard, so that nothing is copied, and neither they
    nor the samples may be kept. Raises `PoolFull` when the shard does not fit.
    """
    (name,) = (name for name in schema.names if name != "sample_id")
    samples = training_samples(batch)
    lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    with store.create(
        stage=stage,
        iteration=iteration,
        rank=rank,
        schema=schema,
        rows=len(samples),
        lengths={name: lengths},
    ) as writer:
        writer.values("sample_id")[:] = batch.rows
        score(samples, writer.rows(name))
        return store.complete(writer.seal())
