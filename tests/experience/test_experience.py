"""Rewards and advantages from shards, against plain Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from earl_core.algorithms.moments import RankStatistics, merge_statistics
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.reward import RewardConfig
from earl_core.dispatch import Batch, Manifest, ShardStore
from earl_core.experience.advantage import advantage_rows, advantage_statistics
from earl_core.experience.reward import reward_rows
from earl_core.trajectory.samples import Episode, Rows, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import (
    ADVANTAGE_SCHEMA,
    REFERENCE_SCHEMA,
    REWARD_SCHEMA,
    ROLLOUT_SCHEMA,
)
from tests.columns import Columns, copied_rows, list_column
from tests.published import published


def sealed(store: ShardStore, stage: str, schema: pa.Schema, rows: Columns | Rows) -> Manifest:
    if isinstance(rows, dict):
        rows = copied_rows(rows)
    entry = store.publish(stage=stage, iteration=0, rank=0, schema=schema, rows=rows)
    return Manifest(
        run="r", iteration=0, stage=stage, key="k", policy_version=0, shards=(entry,)
    ).sealed()


def played(episode_id: int, group: int, rewards: list[list[float]]) -> Episode:
    """One sample for each inner list, one turn for each reward: 2 given and 2 sampled tokens."""
    samples = []
    for turns in rewards:
        sample = Sample()
        for reward in turns:
            sample.begin_turn([1, 2])
            sample.answer([3, 4], [-0.5, -0.25], [VersionSpan(0, 0, 2)])
            sample.turn_rewards[-1] = reward
        samples.append(sample)
    return Episode(episode_id, group, group, samples, "done")


def advantages(
    batch: Batch, algorithm: AlgorithmConfig
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Both steps of the stage in its only rank: the shard's columns and the metrics."""
    statistics = merge_statistics([advantage_statistics(batch, algorithm).model_dump()])
    rows, metrics, _ = advantage_rows(batch, algorithm, RankStatistics.model_validate(statistics))
    return published(rows, ADVANTAGE_SCHEMA)[0].to_pydict(), metrics


EPISODES = [
    played(0, 0, [[0.0, 1.0], [0.5]]),
    played(1, 0, [[-1.0]]),
    played(2, 1, [[0.25]]),
    played(3, 2, [[1.0]]),
    played(4, 2, [[3.0]]),
]


@pytest.fixture
def rewarded(tmp_path: Path) -> tuple[ShardStore, Manifest, Manifest]:
    store = ShardStore(tmp_path, 2**30)
    rollout = sealed(store, "rollout", ROLLOUT_SCHEMA, rollout_rows(EPISODES))
    with Batch(store, [rollout]) as batch:
        columns, metrics, episodes = reward_rows(batch, RewardConfig())
    assert episodes == 5
    assert metrics["mean"] == pytest.approx(np.mean([1.5, -1.0, 0.25, 1.0, 3.0]))
    return store, rollout, sealed(store, "reward", REWARD_SCHEMA, columns)


def test_an_episodes_reward_is_on_each_of_its_samples(
    rewarded: tuple[ShardStore, Manifest, Manifest],
) -> None:
    store, _, reward = rewarded
    with Batch(store, [reward]) as batch:
        assert batch.scalars("reward").tolist() == [1.5, 1.5, -1.0, 0.25, 1.0, 3.0]


def test_advantages_cover_all_samples_of_kept_groups(
    rewarded: tuple[ShardStore, Manifest, Manifest],
) -> None:
    store, rollout, reward = rewarded
    with Batch(store, [rollout, reward]) as batch:
        columns, metrics = advantages(batch, AlgorithmConfig(advantage={"name": "dr_grpo"}))
    # The group of episode 2 has one episode and is dropped.
    assert [int(sample) >> 16 for sample in columns["sample_id"]] == [0, 0, 1, 3, 4]
    assert metrics["groups_dropped"] == 1
    rows = columns["advantages"]
    assert rows[0] == [0, 0, 1.25, 1.25, 0, 0, 1.25, 1.25]
    assert rows[1] == [0, 0, 1.25, 1.25]
    assert rows[2] == [0, 0, -1.25, -1.25]
    assert rows[3] == [0, 0, -1.0, -1.0]
    assert rows[4] == [0, 0, 1.0, 1.0]


def test_kl_in_the_reward_charges_trained_tokens(
    rewarded: tuple[ShardStore, Manifest, Manifest],
) -> None:
    store, rollout, reward = rewarded
    with Batch(store, [rollout]) as batch:
        lengths = [len(batch.row("tokens", row)) for row in range(len(batch))]
        ids = batch.rows.copy()
    columns: Columns = {
        "sample_id": ids,
        "reference_logprobs": list_column([np.full(n, -1.0) for n in lengths], "float32"),
    }
    reference = sealed(store, "reference", REFERENCE_SCHEMA, columns)
    algorithm = AlgorithmConfig.model_validate(
        {
            "advantage": "dr_grpo",
            "kl": {"placement": "reward", "estimator": "k1", "coefficient": 0.1},
        }
    )
    with Batch(store, [rollout, reward, reference]) as batch:
        result, _ = advantages(batch, algorithm)
    # k1 of a turn is (-0.5 + 1) + (-0.25 + 1) = 1.25; episode 0 has three turns, episode 1 one.
    first, second = 1.5 - 0.1 * 3.75, -1.0 - 0.1 * 1.25
    assert result["advantages"][0][2] == pytest.approx(first - (first + second) / 2)


def test_how_often_the_bound_of_k3_acts_is_counted(
    rewarded: tuple[ShardStore, Manifest, Manifest],
) -> None:
    store, rollout, reward = rewarded
    with Batch(store, [rollout]) as batch:
        lengths = [len(batch.row("tokens", row)) for row in range(len(batch))]
        ids = batch.rows.copy()
    # The first sample's tokens lie 12 nats below the reference.
    values = [np.full(n, 12.0 if row == 0 else -0.5) for row, n in enumerate(lengths)]
    columns: Columns = {
        "sample_id": ids,
        "reference_logprobs": list_column(values, "float32"),
    }
    reference = sealed(store, "reference", REFERENCE_SCHEMA, columns)
    kl = {"placement": "reward", "estimator": "k3", "coefficient": 0.1}
    algorithm = AlgorithmConfig.model_validate({"advantage": "dr_grpo", "kl": kl})
    with Batch(store, [rollout, reward, reference]) as batch:
        result, metrics = advantages(batch, algorithm)
    assert 0 < metrics["kl_bounded_share"] < 1
    # Each of them pays at most the coefficient times 10 nats.
    assert min(min(row) for row in result["advantages"]) > -100


def test_nothing_left_to_train_is_counted(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 2**30)
    rollout = sealed(store, "rollout", ROLLOUT_SCHEMA, rollout_rows(EPISODES[2:3]))
    with Batch(store, [rollout]) as batch:
        columns, _, _ = reward_rows(batch, RewardConfig())
    reward = sealed(store, "reward", REWARD_SCHEMA, columns)
    with Batch(store, [rollout, reward]) as batch:
        statistics = advantage_statistics(batch, AlgorithmConfig())
        rows, metrics, tokens = advantage_rows(batch, AlgorithmConfig(), statistics)
    assert (statistics.episodes, statistics.groups, tokens) == (0, 1, 0)
    assert len(rows.numbers["sample_id"]) == 0
    assert (metrics["episodes_kept"], metrics["groups_dropped"], metrics["std"]) == (0, 1, 0)
