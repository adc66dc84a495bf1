"""The feed gives what packing gives, one microbatch ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from earl_core.learner import microbatches as feed_module
from earl_core.learner.data.packing import (
    PackedMicrobatch,
    TrainingSample,
    pack,
    plan_microbatches,
)
from earl_core.learner.microbatches import FedMicrobatch, Feed
from earl_core.learner.staging import Staging
from tests.learner.helpers import random_samples

CPU = torch.device("cpu")
ARRAYS = ("tokens", "position_ids", "predictors", "targets", "episode_index")


def planned(samples: Sequence[TrainingSample]) -> list[list[int]]:
    return plan_microbatches([len(sample.tokens) for sample in samples], 60)


def assert_same(found: PackedMicrobatch, expected: PackedMicrobatch) -> None:
    assert (found.rows, found.lengths) == (expected.rows, expected.lengths)
    assert found.trained_counts == expected.trained_counts
    assert found.tree == expected.tree
    for name in ARRAYS:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert list(found.columns) == list(expected.columns)
    for name, column in found.columns.items():
        np.testing.assert_array_equal(column, expected.columns[name])


def assert_on_device(fed: FedMicrobatch, packed: PackedMicrobatch) -> None:
    for name in ("tokens", "position_ids", "predictors", "targets"):
        assert torch.equal(getattr(fed.tensors, name), torch.from_numpy(getattr(packed, name)))
    assert torch.equal(fed.episode_index, torch.from_numpy(packed.episode_index))
    for name, column in packed.columns.items():
        assert torch.equal(fed.columns[name], torch.from_numpy(column))


def test_microbatches_come_in_order_and_equal_packing() -> None:
    samples = random_samples(40)
    plan = planned(samples)
    fed = list(Feed(CPU).microbatches(samples, plan))
    assert len(fed) == len(plan) > 5
    for ours, rows in zip(fed, plan, strict=True):
        expected = pack(samples, rows)
        assert_same(ours.packed, expected)
        assert_on_device(ours, expected)
    assert list(Feed(CPU).microbatches(samples, [])) == []


def test_a_feed_that_stages_gives_the_same() -> None:
    samples = random_samples(40)
    plan = planned(samples)
    feed = Feed(CPU)
    # What a CUDA device has, with ordinary memory.
    feed._stagings = (Staging(CPU), Staging(CPU))
    for fed, rows in zip(feed.microbatches(samples, plan), plan, strict=True):
        expected = pack(samples, rows)
        assert_same(fed.packed, expected)
        assert_on_device(fed, expected)


def test_a_staged_microbatch_equals_packing_and_its_copy_outlives_the_buffer() -> None:
    samples = random_samples(40)
    staging = Staging(CPU)
    sent = []
    for rows in planned(samples):
        staging.begin(sum(len(samples[row].tokens) for row in rows) * 56 + 9 * 64)
        packed = pack(samples, rows, staging.allocate)
        expected = pack(samples, rows)
        assert_same(packed, expected)
        buffer = staging.send()
        buffer.receive()
        sent.append((buffer.tensor(packed.tokens), buffer.tensor(packed.targets), expected))
    for tokens, targets, expected in sent:
        assert torch.equal(tokens, torch.from_numpy(expected.tokens))
        assert torch.equal(targets, torch.from_numpy(expected.targets))


def test_a_staging_buffer_hands_out_no_more_than_was_begun() -> None:
    staging = Staging(CPU)
    staging.begin(1000)
    staging.allocate(100, "int64")
    with pytest.raises(BufferError):
        staging.allocate(100, "int64")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_what_the_cpu_gets() -> None:
    samples = random_samples(200)
    plan = planned(samples)
    device = torch.device("cuda")
    for fed, rows in zip(Feed(device).microbatches(samples, plan), plan, strict=True):
        for tensor in (fed.tensors.tokens, fed.episode_index, *fed.columns.values()):
            assert tensor.device.type == "cuda"
        expected = pack(samples, rows)
        assert torch.equal(fed.tensors.tokens.cpu(), torch.from_numpy(expected.tokens))
        assert torch.equal(fed.tensors.targets.cpu(), torch.from_numpy(expected.targets))
        for name, column in fed.columns.items():
            assert torch.equal(column.cpu(), torch.from_numpy(expected.columns[name]))


def test_the_next_microbatch_is_packed_while_the_current_one_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = random_samples(12)
    plan = planned(samples)
    packed = [threading.Event() for _ in plan]
    order = iter(packed)

    def signalling(*arguments: Any) -> PackedMicrobatch:
        made = pack(*arguments)
        next(order).set()
        return made

    monkeypatch.setattr(feed_module, "pack", signalling)
    for number, _ in enumerate(Feed(CPU).microbatches(samples, plan)):
        if number + 1 < len(plan):
            assert packed[number + 1].wait(200)
        if number + 2 < len(plan):
            assert not packed[number + 2].is_set()


def test_an_error_comes_where_its_microbatch_would_and_no_thread_is_left() -> None:
    samples = random_samples(6)
    samples[3].loss_mask[0] = 1
    seen = []

    def read_all() -> None:
        for fed in Feed(CPU).microbatches(samples, [[0], [1], [2], [3], [4]]):
            seen.append(fed.packed.rows)

    with pytest.raises(ValueError, match="first token"):
        read_all()
    assert seen == [(0,), (1,), (2,)]
    stream: Any = Feed(CPU).microbatches(samples, [[0], [1], [2]])
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed")]
