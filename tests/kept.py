"""Played episodes in the shards of a run, without engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory
from earl_core.trajectory.samples import Episode, Rows, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import REWARD_SCHEMA, ROLLOUT_SCHEMA, SAMPLE_BITS


def game(number: int, outcome: str = "win", samples: int = 1) -> Episode:
    """Two turns with answers of three and four tokens; `samples`: 1, or 2 with a turn each."""
    first = Sample()
    first.begin_turn([1, 2], "board 1")
    first.answer([5, 6, 7], [-0.5, -0.25, -0.125], [VersionSpan(0, 0, 3)], "[5]")
    second = Sample() if samples == 2 else first
    second.begin_turn([3], "board 2")
    second.answer([8, 9, 10, 11], [-0.5] * 4, [VersionSpan(0, 0, 4)], "[9]")
    second.turn_rewards[-1] = 1.0
    second.texts.append("you won")
    played = [first, second][:samples]
    return Episode(number, 0, 0, played, "done", {"outcome": outcome})


def seal_episodes(
    run: RunDirectory, iteration: int, shards: Sequence[Sequence[Episode]]
) -> tuple[Manifest, Manifest]:
    """The sealed rollout of these episodes, a shard for each of the lists, and its rewards."""
    store = run.store
    rollout = [
        store.publish(
            stage="rollout",
            iteration=iteration,
            rank=rank,
            schema=ROLLOUT_SCHEMA,
            rows=rollout_rows(episodes),
        )
        for rank, episodes in enumerate(shards)
    ]
    samples = {
        episode.episode_id << SAMPLE_BITS | number: (episode.total_reward, sample.turn_rewards)
        for episodes in shards
        for episode in episodes
        for number, sample in enumerate(episode.samples)
    }
    ids = sorted(samples)
    rewards, turns = zip(*(samples[row] for row in ids), strict=True)
    rows = Rows(
        {"sample_id": ids, "reward": rewards, "turn_totals": turns},
        {"turn_totals": np.array([len(row) for row in turns], np.int64)},
        {"scores": ["{}"] * len(ids)},
    )
    reward = store.publish(
        stage="reward", iteration=iteration, rank=0, schema=REWARD_SCHEMA, rows=rows
    )
    manifests = [
        run.seal(
            Manifest(
                run=run.uid,
                iteration=iteration,
                stage=stage,
                key=f"{iteration}",
                policy_version=iteration,
                shards=tuple(entries),
            )
        )
        for stage, entries in (("rollout", rollout), ("reward", [reward]))
    ]
    return manifests[0], manifests[1]
