"""Packing: nothing lost, nothing cut, nothing dependent on anything but the arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.learner.data.packing import TrainingSample, pack, plan_microbatches
from earl_core.learner.data.samples import Minibatch, sample_table, split_table
from tests.learner.helpers import random_samples

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 100))
def test_every_sample_is_placed_once_and_budgets_hold(lengths: list[int], budget: int) -> None:
    plan = plan_microbatches(lengths, budget)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    for part in plan:
        total = sum(lengths[row] for row in part)
        assert total <= budget or len(part) == 1
        assert [lengths[row] for row in part] == sorted((lengths[r] for r in part), reverse=True)
    assert plan == plan_microbatches(np.array(lengths), budget)


@given(LENGTHS, st.integers(60, 100))
def test_at_most_one_microbatch_is_half_empty(lengths: list[int], budget: int) -> None:
    plan = plan_microbatches(lengths, budget)
    half_full = sum(2 * sum(lengths[row] for row in part) <= budget for part in plan)
    assert half_full <= 1


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=60))
def test_episodes_stay_whole(rows: list[tuple[int, int]]) -> None:
    lengths, episodes = [row[0] for row in rows], [row[1] for row in rows]
    plan = plan_microbatches(lengths, 40, keep_together=episodes)
    assert sorted(row for part in plan for row in part) == list(range(len(rows)))
    homes: dict[int, set[int]] = {}
    for number, part in enumerate(plan):
        for row in part:
            homes.setdefault(episodes[row], set()).add(number)
        labels = {episodes[row] for row in part}
        assert sum(lengths[row] for row in part) <= 40 or len(labels) == 1
    assert all(len(numbers) == 1 for numbers in homes.values())


def test_pack_lays_samples_end_to_end() -> None:
    def sample(tokens: list[int], mask: list[int], episode: int) -> TrainingSample:
        return TrainingSample(
            np.array(tokens, np.int32),
            np.array(mask, np.uint8),
            rollout_logprobs=-np.arange(len(tokens), dtype=np.float32),
            episode_id=episode,
        )

    samples = [sample([5, 6, 7], [0, 1, 1], 9), sample([1, 2, 3, 4], [0, 0, 1, 0], 4)]
    packed = pack(samples, [1, 0])
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert [run.length for run in packed.tree.runs] == [4, 3]
    assert packed.predictors.tolist() == [1, 4, 5]
    assert packed.targets.tolist() == [3, 6, 7]
    assert packed.episode_ids.tolist() == [4, 9]
    assert packed.episode_index.tolist() == [0, 1, 1]
    assert packed.columns["rollout_logprobs"].tolist() == [-2, -1, -2]
    assert "advantages" not in packed.columns
    assert [part.tolist() for part in packed.split_by_row(packed.targets)] == [[3], [6, 7]]


@given(st.integers(1, 30), st.integers(0, 5), st.integers(20, 200))
def test_packs_hold_every_trained_token_once(count: int, seed: int, budget: int) -> None:
    samples = random_samples(count, seed=seed)
    plan = plan_microbatches([len(sample.tokens) for sample in samples], budget)
    seen: dict[int, np.ndarray] = {}
    for part in plan:
        packed = pack(samples, part)
        seen |= dict(
            zip(packed.rows, packed.split_by_row(packed.columns["old_logprobs"]), strict=True)
        )
        assert np.array_equal(packed.tokens[packed.predictors + 1], packed.targets)
    for row, sample in enumerate(samples):
        assert np.array_equal(seen[row], sample.old_logprobs[sample.loss_mask == 1])


def test_bad_samples_are_refused_with_a_sentence() -> None:
    good = random_samples(1)[0]
    first = np.ones_like(good.loss_mask)
    with pytest.raises(ValueError, match="begin with a given token"):
        pack([TrainingSample(good.tokens, first, good.rollout_logprobs)], [0])
    with pytest.raises(ValueError, match="same length"):
        TrainingSample(good.tokens, good.loss_mask[:-1], good.rollout_logprobs)
    with pytest.raises(ValueError, match="no tokens"):
        plan_microbatches([3, 0], 10)


def split_minibatches(samples: list[TrainingSample], count: int, **seeds: int) -> list[Minibatch]:
    """Of samples that are all there are."""
    return split_table(sample_table(samples), range(len(samples)), count, **seeds)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_minibatches_are_whole_groups_in_a_reproducible_order(
    count: int, parts: int, epoch: int
) -> None:
    samples = random_samples(count, samples_per_episode=2)
    split = split_minibatches(samples, parts, seed=1, iteration=2, epoch=epoch)
    assert split == split_minibatches(samples, parts, seed=1, iteration=2, epoch=epoch)
    assert sorted(row for part in split for row in part.rows) == list(range(count))
    groups = [{samples[row].group_id for row in part.rows} for part in split]
    assert sum(len(group) for group in groups) == len(set().union(*groups))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert len(split) == min(parts, sum(sizes))
    for part in split:
        trained = sum(int(samples[row].loss_mask.sum()) for row in part.rows)
        assert part.totals.n_tokens == sum(part.token_counts.values()) == trained


def test_another_epoch_is_another_split() -> None:
    samples = random_samples(64)
    first = split_minibatches(samples, 4, seed=0, iteration=0, epoch=0)
    assert first != split_minibatches(samples, 4, seed=0, iteration=0, epoch=1)
    assert first != split_minibatches(samples, 4, seed=0, iteration=1, epoch=0)
