"""Made-up rows and their shards."""

from __future__ import annotations

import numpy as np

from earl_core.dispatch import Manifest, ShardEntry, ShardStore, ShardWriter
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, ROLLOUT_SCHEMA


def episode(number: int, turns: list[tuple[int, int]], reason: str = "done") -> Episode:
    """An episode with turns of (observation tokens, answer tokens)."""
    draw = np.random.default_rng(number)
    sample = Sample()
    for observed, answered in turns:
        sample.begin_turn(draw.integers(0, 99, observed).tolist())
        tokens, logprobs = (
            draw.integers(0, 99, answered).tolist(),
            (-draw.random(answered)).tolist(),
        )
        sample.answer(tokens, logprobs, [VersionSpan(3, 0, len(tokens))])
    if turns:
        sample.turn_rewards[-1] = float(number)
    return Episode(number, number // 2, number // 2, [sample], reason)


def manifest_of(*entries: ShardEntry, stage: str = "rollout") -> Manifest:
    """An unsealed manifest over the shards."""
    return Manifest(
        run="r", iteration=4, stage=stage, key="k", policy_version=4, shards=tuple(entries)
    )


def write(store: ShardStore, episodes: list[Episode], rank: int = 0) -> Manifest:
    """A sealed manifest over one shard with the episodes."""
    entry = store.publish(
        stage="rollout", iteration=4, rank=rank, schema=ROLLOUT_SCHEMA, rows=rollout_rows(episodes)
    )
    return manifest_of(entry).sealed()


def begin(store: ShardStore, rows: int = 3, length: int = 100_000) -> ShardWriter:
    """A shard of advantages, several blocks long by default; its values are not written yet."""
    return store.create(
        stage="advantage",
        iteration=4,
        rank=0,
        schema=ADVANTAGE_SCHEMA,
        rows=rows,
        lengths={"advantages": np.full(rows, length)},
    )


def fill(writer: ShardWriter, value: float = 0.5) -> None:
    writer.values("sample_id")[:] = np.arange(len(writer.values("sample_id")))
    writer.values("advantages")[:] = value


def publish(
    store: ShardStore, value: float = 0.5, rows: int = 3, length: int = 100_000
) -> ShardEntry:
    with begin(store, rows, length) as writer:
        fill(writer, value)
        return store.complete(writer.seal())
