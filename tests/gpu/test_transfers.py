"""Bytes on their way between host and device: staging, the feed, parking, shards."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.config.update import UpdateConfig
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.learner.data.packing import pack, plan_microbatches
from earl_core.learner.memory import Parking
from earl_core.learner.microbatches import Feed
from earl_core.learner.staging import Staging
from earl_core.learner.state.optimizer import PolicyOptimizer
from earl_core.tensors.slices import slices_of
from tests.learner.helpers import random_samples, save_model
from tests.learner.test_feed import assert_same
from tests.learner.test_policy_learner import make_learner
from tools.sealed_segment import LOCATIONS, Shard


def test_staged_bytes_arrive_as_they_were_in_buffers_that_are_used_again(
    device: torch.device,
) -> None:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    staging = Staging(device, stream)
    draw, sent = np.random.default_rng(0), []
    for number in range(6):
        size = 10_000 * (number % 3 + 1)
        staging.begin(size * 12 + 256)
        tokens, values = staging.allocate(size, "int64"), staging.allocate(size, "float32")
        tokens[:], values[:] = draw.integers(0, 2**40, size), draw.normal(size=size)
        kept = tokens.copy(), values.copy()
        buffer = staging.send()
        buffer.receive()
        there = buffer.tensor(tokens), buffer.tensor(values)
        # The product is queued behind the copy; the next microbatch overwrites the buffer.
        sent.append((kept, [each * 2 for each in there]))
    for kept, there in sent:
        for host, doubled in zip(kept, there, strict=True):
            assert doubled.device.type == device.type
            np.testing.assert_array_equal(doubled.cpu().numpy(), host * 2)


def test_the_feed_gives_what_packing_gives(device: torch.device) -> None:
    samples = random_samples(40)
    plan = plan_microbatches([len(sample.tokens) for sample in samples], 60)
    for fed, rows in zip(Feed(device).microbatches(samples, plan), plan, strict=True):
        packed = pack(samples, rows)
        assert_same(fed.packed, packed)
        for name in ("tokens", "position_ids", "predictors", "targets"):
            there = getattr(fed.tensors, name)
            assert there.device.type == device.type
            np.testing.assert_array_equal(there.cpu().numpy(), getattr(packed, name))
        for name, column in packed.columns.items():
            np.testing.assert_array_equal(fed.columns[name].cpu().numpy(), column)


def test_parked_memory_is_given_back_and_comes_again_as_it_was(device: torch.device) -> None:
    tensors = [torch.randn(1000, 1000, device=device) for _ in range(8)]
    views = [tensor[10:20] for tensor in tensors]
    copies = [tensor.cpu().clone() for tensor in tensors]
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    parking = Parking(device.type)
    assert parking.give(tensors) == 32_000_000
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    if cuda:
        assert before - torch.cuda.memory_allocated() >= 32_000_000
    parking.take()
    for tensor, view, copy in zip(tensors, views, copies, strict=True):
        assert torch.equal(tensor.cpu(), copy)
        assert torch.equal(view.cpu(), copy[10:20])


def test_a_learner_that_was_parked_updates_as_one_that_was_not(
    device: torch.device, tmp_path: Path
) -> None:
    save_model("llama", tmp_path)
    samples = [random_samples(12, seed=n, samples_per_episode=2) for n in range(2)]
    learners = [make_learner(tmp_path, epsilon=1e-2, learning_rate=0.1) for _ in range(2)]
    for learner in learners:
        learner.update(samples[0], iteration=0)
    parked, parking = learners[0], Parking(device.type)
    # As the worker of the update gives its memory back.
    weights = [each.tensor for each in slices_of(parked.named_weights())]
    states = [tensor for entry in parked.optimizer.state.values() for tensor in entry.values()]
    assert states
    assert parking.give([*weights, *states]) > 0
    parking.take()
    norms = [learner.update(samples[1], iteration=1)["grad_norm"] for learner in learners]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0
    theirs = learners[1].named_weights()
    for name, weight in parked.named_weights().items():
        assert torch.allclose(weight, theirs[name], atol=1e-6), name


@pytest.mark.gpu
def test_offloaded_steps_are_resident_ones_bit_for_bit(cuda: torch.device) -> None:
    """Six buckets of matrices and one of vectors, one of them larger than a bucket should be."""
    torch.manual_seed(0)
    shapes = [(4096, 3072)] * 5 + [(8192, 4096), (1000,), (1,)]
    first = [torch.randn(shape, device=cuda) for shape in shapes]
    optimizers, weights = [], []
    for offload in (False, True):
        mine = [torch.nn.Parameter(each.clone()) for each in first]
        named = [(str(number), each) for number, each in enumerate(mine)]
        config = UpdateConfig(weight_decay=0.1, learning_rate=1e-2)
        optimizers.append(PolicyOptimizer(named, config, offload=offload))
        weights.append(mine)
    for _ in range(3):
        gradients = [torch.randn_like(each) for each in first]
        for optimizer, mine in zip(optimizers, weights, strict=True):
            for weight, gradient in zip(mine, gradients, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
    resident, offloaded = optimizers
    for name, state in resident.state.items():
        for key, value in state.items():
            there = offloaded.state[name][key]
            assert there.is_pinned()
            assert torch.equal(there, value.cpu()), (name, key)
    for before, one, other in zip(first, *weights, strict=True):
        assert not torch.equal(one, before)
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [4096, 3 * 2**20 + 64])
def test_a_shard_goes_over_as_it_lies(device: torch.device, size: int) -> None:
    # Where a run's shards lie: not every kernel page-locks a file on a disk.
    place = next(path for path in LOCATIONS if path.is_dir())
    with tempfile.TemporaryDirectory(dir=place, prefix="earl-test-") as directory:
        goes_over_as_it_lies(device, Shard(SegmentPool(Path(directory), 2**26), size))


def goes_over_as_it_lies(device: torch.device, shard: Shard) -> None:
    try:
        assert shard.array is not None
        if device.type == "cuda":
            shard.page_lock()
            assert shard.tensor.is_pinned(), "torch would copy it as pageable memory"
        there = shard.tensor.to(device, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert shard.array.any()
        np.testing.assert_array_equal(there.cpu().numpy(), shard.array)
        del there
    finally:
        shard.close()
