"""`update.deterministic`: equal bits on a GPU, where sums may come in any order otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.helpers import random_samples, save_model, with_old_logprobs
from tests.learner.test_policy_learner import make_learner

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(directory: Path) -> dict[str, torch.Tensor]:
    """Weights after an update in bf16 of samples that share a beginning."""
    learner = make_learner(
        directory, precision="bf16", deterministic=True, max_tokens_per_microbatch=4096
    )
    stem = np.arange(1, 41, dtype=np.int32) % 30
    samples = [
        dataclasses.replace(
            sample,
            tokens=np.concatenate([stem, sample.tokens]),
            loss_mask=np.concatenate([np.zeros_like(stem, dtype=np.uint8), sample.loss_mask]),
            **{
                name: np.concatenate([np.zeros(40, dtype=np.float32), getattr(sample, name)])
                for name in ("rollout_logprobs", "advantages", "reference_logprobs", "old_logprobs")
            },
        )
        for sample in random_samples(64, masked=False)
    ]
    before = {name: weight.clone() for name, weight in learner.named_weights().items()}
    metrics = learner.update(with_old_logprobs(samples, learner.score(samples)), iteration=0)
    assert metrics["grad_norm"] > 0
    assert metrics["shared_prefix_share"] > 0.1
    after = {name: weight.clone() for name, weight in learner.named_weights().items()}
    assert any(not torch.equal(before[name], after[name]) for name in after)
    return after


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
def test_two_updates_give_equal_bits(device: str, tmp_path: Path) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the learner takes the GPU")
    save_model("llama", tmp_path)
    try:
        one, other = trained(tmp_path), trained(tmp_path)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one[name], other[name]) for name in one)
