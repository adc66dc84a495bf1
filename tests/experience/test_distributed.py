"""Rewards and advantages on several ranks equal those of one place, for any split."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.algorithms.advantage_batch import filter_episodes
from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.moments import RankStatistics, merge_statistics
from earl_core.algorithms.turns import Turns
from earl_core.cluster.errors import WorkerCallFailed
from earl_core.cluster.rpc import merge_results
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config import RunConfig
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.dispatch import Batch, Manifest, ShardEntry, ShardStore
from earl_core.experience.advantage import ADVANTAGE_RULES, advantage_rows, advantage_statistics
from earl_core.experience.reward import REWARD_RULES
from earl_core.run import RunDirectory
from earl_core.run.run_stores import run_store
from earl_core.trajectory.samples import Episode, Rows, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import (
    ADVANTAGE_SCHEMA,
    REFERENCE_SCHEMA,
    REWARD_SCHEMA,
    ROLLOUT_SCHEMA,
)
from tests.algorithms.central import compute_advantages
from tests.columns import Columns, copied_rows, list_column
from tests.published import published

SPECS: list[dict[str, Any]] = [
    {"name": "reinforce"},
    {"name": "reinforce", "baseline": "batch_mean"},
    {"name": "reinforce_plus_plus"},
    {"name": "rloo"},
    {"name": "turn_returns", "discount": 0.9},
    {"name": "gigpo"},
    {"name": "grpo"},
    {"name": "dr_grpo"},
]
KL = {"placement": "reward", "estimator": "k2", "coefficient": 0.25}


def played(
    episode_id: int, group: int, turns: list[list[int]], rng: np.random.Generator
) -> Episode:
    """One sample for each inner list; its numbers are the tokens sampled in each turn."""
    samples = []
    for counts in turns:
        sample = Sample()
        for count in counts:
            sample.begin_turn([1, 2])
            logprobs = rng.uniform(-3, -0.1, count).tolist()
            sample.answer([3] * count, logprobs, [VersionSpan(0, 0, count)])
            sample.turn_rewards[-1] = int(rng.integers(-8, 9)) / 8
        samples.append(sample)
    return Episode(episode_id, group, group, samples, "done")


@st.composite
def batches(draw: st.DrawFn) -> list[Episode]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    turns = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=2), min_size=1, max_size=2)
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    return [played(at, group, draw(turns), rng) for at, group in enumerate(groups)]


def sealed(stage: str, entries: list[ShardEntry]) -> Manifest:
    return Manifest(
        run="r", iteration=0, stage=stage, key="k", policy_version=0, shards=tuple(entries)
    ).sealed()


def written(store: ShardStore, stage: str, schema: Any, parts: Sequence[Rows]) -> Manifest:
    entries = [
        store.publish(stage=stage, iteration=0, rank=rank, schema=schema, rows=rows)
        for rank, rows in enumerate(parts)
    ]
    return sealed(stage, entries)


def made(store: ShardStore, episodes: list[Episode], seed: int) -> list[Manifest]:
    """Manifests of rollout (two producers), reward and reference for these episodes."""
    half = len(episodes) // 2
    parts = [part for part in (episodes[:half], episodes[half:]) if part]
    rows = [(e.episode_id << 16 | at, e, s) for e in episodes for at, s in enumerate(e.samples)]
    ids = np.array([row[0] for row in rows], dtype=np.int64)
    rewards = np.array([row[1].total_reward for row in rows], dtype=np.float32)
    rng = np.random.default_rng(seed)
    scored = [rng.uniform(-3, -0.1, len(row[2].tokens)) for row in rows]
    reward: Columns = {
        "sample_id": ids,
        "reward": rewards,
        "scores": ["{}"] * len(ids),
        "turn_totals": list_column([row[2].turn_rewards for row in rows], "float32"),
    }
    reference: Columns = {
        "sample_id": ids,
        "reference_logprobs": list_column(scored, "float32"),
    }
    return [
        written(store, "rollout", ROLLOUT_SCHEMA, [rollout_rows(part) for part in parts]),
        written(store, "reward", REWARD_SCHEMA, [copied_rows(reward)]),
        written(store, "reference", REFERENCE_SCHEMA, [copied_rows(reference)]),
    ]


def central(
    store: ShardStore, manifests: list[Manifest], algorithm: AlgorithmConfig
) -> tuple[dict[int, np.ndarray], dict[str, float]]:
    """Trained tokens' advantages of each kept sample, and metrics: all rewards in one place."""
    with Batch(store, manifests) as batch:
        masks = [batch.row("loss_mask", row).astype(bool) for row in range(len(batch))]
        logs = [np.array(values, np.float64) for values in batch.list_rows("rollout_logprobs")]
        references = [
            np.array(values, np.float64) for values in batch.list_rows("reference_logprobs")
        ]
        sample_ids, episode_of = batch.rows.tolist(), batch.scalars("episode_id")
        reward_of, group_of = batch.scalars("reward"), batch.scalars("group_id")
        masks = [mask.copy() for mask in masks]
        starts = [list(values) for values in batch.list_rows("turn_starts")]
        turn_rewards = [list(values) for values in batch.list_rows("turn_rewards")]
    episodes = sorted(set(episode_of.tolist()))
    first = [episode_of.tolist().index(episode) for episode in episodes]
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    kept = filter_episodes(group_of[first], group_relative=estimator.needs_groups)
    there = [episode for episode, keep in zip(episodes, kept, strict=True) if keep]
    rows = [row for row, episode in enumerate(episode_of) if episode in there]
    counts = [
        sum(int(masks[row].sum()) for row in rows if episode_of[row] == episode)
        for episode in there
    ]
    penalties = None
    if algorithm.kl.placement == "reward":
        taken = [
            0.25 * 0.5 * (logs[row][masks[row]] - references[row][masks[row]]) ** 2 for row in rows
        ]
        penalties = np.concatenate([np.empty(0), *taken])
    first = [at for at, keep in zip(first, kept, strict=True) if keep]
    turns = None
    if estimator.turn_level:
        # Every turn of these episodes is given the same tokens.
        parts = [
            (turn_rewards[row][at], there.index(episode_of[row]), int(mask.sum()), group_of[row])
            for row in rows
            for at, mask in enumerate(np.split(masks[row], starts[row][1:]))
        ]
        turns = Turns.checked(*(map(list, zip(*parts, strict=True)) if parts else [[]] * 4))
    tokens = compute_advantages(
        estimator, reward_of[first], group_of[first], counts, penalties, turns
    )
    metrics = {
        "episodes_kept": len(there),
        "groups_dropped": len(episodes) - len(there),
        "episodes_dropped_with_group": len(episodes) - len(there),
        "mean": float(tokens.mean()) if len(tokens) else 0.0,
        "std": float(tokens.std()) if len(tokens) else 0.0,
        "nonzero_share": float((np.abs(tokens) > 1e-6).mean()) if len(tokens) else 0.0,
    }
    if estimator.turn_level and not estimator.token_level:
        seen = Counter(group for *_, group in parts)
        anchored = sum(count for count in seen.values() if count > 1)
        metrics["anchored_share"] = anchored / max(len(parts), 1)
    cuts = np.cumsum([int(masks[row].sum()) for row in rows])[:-1]
    parts = np.split(tokens, cuts) if rows else []
    return {sample_ids[row]: part for row, part in zip(rows, parts, strict=True)}, metrics


def split(
    store: ShardStore, rollout: Manifest, ranks: int, whole_groups: bool, seed: int
) -> list[list[int]]:
    """Any split: each group (or each episode) on a rank drawn at random."""
    rng = np.random.default_rng(seed)
    with Batch(store, [rollout]) as batch:
        units = batch.scalars("group_id" if whole_groups else "episode_id")
        rank_of = dict(zip(np.unique(units), rng.integers(0, ranks, len(units)), strict=False))
        ids = batch.rows.tolist()
    return [
        [row for row, unit in zip(ids, units, strict=True) if rank_of[unit] == rank]
        for rank in range(ranks)
    ]


def trained_tokens(rows: Rows, masks: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    columns = published(rows, ADVANTAGE_SCHEMA)[0].to_pydict()
    found = {}
    for sample_id, values in zip(columns["sample_id"], columns["advantages"], strict=True):
        row = np.array(values, dtype=np.float32)
        mask = masks[int(sample_id)]
        assert (row[~mask] == 0).all()
        found[int(sample_id)] = row[mask]
    return found


@pytest.mark.parametrize("kl", [None, KL], ids=["plain", "kl_in_reward"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
@settings(max_examples=8, deadline=None)
@given(batches(), st.integers(1, 6), st.integers(0, 2**32))
def test_any_split_gives_what_one_place_gives(
    spec: dict[str, Any],
    kl: dict[str, Any] | None,
    episodes: list[Episode],
    ranks: int,
    seed: int,
) -> None:
    algorithm = AlgorithmConfig.model_validate({"advantage": spec, **({"kl": kl} if kl else {})})
    whole = ADVANTAGE_ESTIMATORS.build(spec).needs_groups
    with tempfile.TemporaryDirectory() as directory:
        store = ShardStore(Path(directory), 2**30)
        manifests = made(store, episodes, seed)
        expected, metrics = central(store, manifests, algorithm)
        with Batch(store, manifests[:1]) as batch:
            masks = {
                int(batch.rows[row]): batch.row("loss_mask", row).astype(bool).copy()
                for row in range(len(batch))
            }
        parts = split(store, manifests[0], ranks, whole, seed)

        def in_every_rank(work: Any) -> list[Any]:
            results = []
            for rows in parts:
                with Batch(store, manifests, rows=rows) as own:
                    results.append(work(own))
            return results

        sent = in_every_rank(lambda own: advantage_statistics(own, algorithm).model_dump())
        sent = json.loads(json.dumps(sent))
        merged = RankStatistics.model_validate(merge_statistics(sent))
        if not expected:
            assert merged.episodes == 0
            return
        groups = {episode.group_id for episode in episodes if not episode.failed}
        assert merged.groups == (len(groups) if whole else None)
        results = in_every_rank(lambda own: advantage_rows(own, algorithm, merged))
        found: dict[int, np.ndarray] = {}
        for trained, _, _ in results:
            found |= trained_tokens(trained, masks)
    assert set(found) == set(expected)
    for sample_id, values in expected.items():
        np.testing.assert_allclose(found[sample_id], values, rtol=1e-6, atol=1e-6)
    told = [{"metrics": given, "weight": weight} for _, given, weight in results]
    assert merge_results(told, ADVANTAGE_RULES)["metrics"] == pytest.approx(metrics, abs=1e-6)


def test_ranks_tell_each_other_moments_of_the_batch_alone() -> None:
    rng = np.random.default_rng(3)
    episodes = [played(at, at // 2, [[2]], rng) for at in range(4)]
    sent = {}
    with tempfile.TemporaryDirectory() as directory:
        store = ShardStore(Path(directory), 2**30)
        manifests = made(store, episodes, 3)
        for name in ("grpo", "reinforce_plus_plus"):
            with Batch(store, manifests) as batch:
                algorithm = AlgorithmConfig(advantage={"name": name})
                sent[name] = advantage_statistics(batch, algorithm).model_dump()
    assert sent["grpo"] == {"episodes": 4, "batch": None, "groups": 2}
    assert set(sent["reinforce_plus_plus"]["batch"]) == {"count", "mean", "m2"}


def configuration(
    tmp_path: Path, reward: dict[str, Any] | None = None, **algorithm: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "iterations": 1,
            "runs_directory": str(tmp_path / "runs"),
            "model": {"path": "nowhere"},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {"prompts_per_iteration": 4, "group_size": 4, "max_turns": 5},
            "experience": {"ranks": 3},
            "algorithm": algorithm,
            "reward": reward or {},
            "dispatch": {"directory": str(tmp_path / "shm")},
        }
    )


class Ranks:
    """A real group of three `experience` ranks on a run of its own."""

    def __init__(self, tmp_path: Path, config: RunConfig) -> None:
        self.run = RunDirectory.open(config)
        self.store = run_store(self.run.path, config)
        self._tmp_path, self._config = tmp_path, config
        self.begin()

    def begin(self) -> None:
        """Start the ranks, anew where one was lost."""
        self.group = WorkerGroup(
            "experience",
            "earl_core.experience.experience_worker:ExperienceWorker",
            log_directory=self._tmp_path / "logs",
        )
        arguments = {
            "config": self._config.model_dump(mode="json"),
            "run_directory": str(self.run.path),
        }
        self.group.start({"stage": "experience", "replicas": 3}, arguments, 3)

    def call(self, method: str, manifests: list[Manifest], **more: Any) -> list[dict[str, Any]]:
        given = [self.run.seal(each).model_dump(mode="json") for each in manifests]
        return self.group.call(
            method, stage="s", iteration=0, deadline_seconds=300, manifests=given, **more
        )

    def close(self) -> None:
        self.group.stop(grace_seconds=2)
        self.run.finish()
        self.run.close()


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_plus_plus"])
def test_three_real_ranks_equal_one_place(tmp_path: Path, advantage: str) -> None:
    config = configuration(tmp_path, advantage=advantage)
    rng = np.random.default_rng(5)
    # The group of the last episode has lost its others, so that a group-relative estimator drops
    # it; with two groups left at least one of three ranks has nothing to do.
    groups = [0, 0, 0, 1, 1, 2]
    episodes = [played(at, group, [[2, 1], [3]], rng) for at, group in enumerate(groups)]
    ranks = Ranks(tmp_path, config)
    try:
        rollout, central_reward, _ = made(ranks.store, episodes, 5)
        results = ranks.call("reward", [rollout])
        merged = merge_results(results, REWARD_RULES)
        totals = [episode.total_reward for episode in episodes]
        assert merged["metrics"]["mean"] == pytest.approx(np.mean(totals))
        assert merged["metrics"]["std"] == pytest.approx(np.std(totals))
        assert merged["metrics"]["max"] == max(totals)
        reward = sealed("reward", [ShardEntry.model_validate(e) for e in merged["shards"]])
        with Batch(ranks.store, [reward]) as ours, Batch(ranks.store, [central_reward]) as theirs:
            assert ours.rows.tolist() == theirs.rows.tolist()
            assert ours.scalars("reward").tolist() == theirs.scalars("reward").tolist()
        statistics = merge_statistics(ranks.call("advantage_statistics", [rollout, reward]))
        results = ranks.call("advantage", [rollout, reward], statistics=statistics)
        merged = merge_results(results, ADVANTAGE_RULES)
        found = sealed("advantage", [ShardEntry.model_validate(e) for e in merged["shards"]])
        reference = made(ranks.store, episodes, 5)
        expected, metrics = central(ranks.store, reference, config.algorithm)
        seconds = merged["metrics"].pop("seconds")
        assert seconds > 0
        assert merged["metrics"].pop("read_seconds") > 0
        assert 0 <= merged["metrics"].pop("imbalance") < 1
        assert merged["metrics"] == pytest.approx(metrics, abs=1e-6)
        with Batch(ranks.store, [rollout, found]) as batch:
            assert batch.rows.tolist() == sorted(expected)
            for row, sample_id in enumerate(batch.rows.tolist()):
                mask = batch.row("loss_mask", row).astype(bool)
                values = batch.row("advantages", row)[mask]
                np.testing.assert_allclose(values, expected[sample_id], rtol=1e-6, atol=1e-6)
    finally:
        ranks.close()


def test_a_rank_without_rows_takes_part(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(1)
    ranks = Ranks(tmp_path, configuration(tmp_path, advantage="rloo"))
    try:
        rollout, reward, _ = made(ranks.store, [played(0, 0, [[2]], rng)], 1)
        statistics = ranks.call("advantage_statistics", [rollout, reward])
        assert [rank["episodes"] for rank in statistics] == [0, 0, 0]
        assert merge_statistics(statistics)["episodes"] == 0
        pair = [played(at, 0, [[2]], rng) for at in range(2)]
        rollout, reward, _ = made(ranks.store, pair, 1)
        statistics = ranks.call("advantage_statistics", [rollout, reward])
        assert sorted(rank["episodes"] for rank in statistics) == [0, 0, 2]
        results = ranks.call(
            "advantage", [rollout, reward], statistics=merge_statistics(statistics)
        )
        assert sorted(len(result["shards"]) for result in results) == [0, 0, 1]
        with pytest.raises(WorkerCallFailed):
            ranks.call("advantage", [reward], statistics=merge_statistics(statistics))
    finally:
        ranks.close()
