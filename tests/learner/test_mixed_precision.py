"""Mixed precision: what it holds, and what it computes in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from earl_core.learner.parallel_model import ParallelModel
from tests.learner.helpers import random_samples, save_model, with_old_logprobs
from tests.learner.launched import launch
from tests.learner.test_policy_learner import make_learner
from tests.learnt import assert_learnt

AUTOCAST_PEAK = 40.32 * 2**30
"""Bytes of the same update when autocast kept bf16 copies of all layers and the embedding and the
head were gathered together in float32: `fake_peaks.seven_billion`'s microbatches at b0b0948."""


def test_a_7b_model_needs_at_most_three_fifths_of_its_peak_under_autocast(tmp_path: Path) -> None:
    (peak,) = launch("tests.learner.fake_peaks", "seven_billion", 1, tmp_path)
    # Weights, moments and gradients in float32 are 14.2 GiB of a rank.
    assert 14.2 * 2**30 < peak <= 0.6 * AUTOCAST_PEAK


def test_bf16_copies_compute_and_live_no_longer_than_their_layer(tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path), precision="bf16", minibatches=1)
    parallel: ParallelModel = learner.parallel
    layers = parallel.model.model.layers
    seen: list[tuple[torch.dtype, bool]] = []

    def look(module: torch.nn.Module, given: object, output: torch.Tensor) -> None:
        other = next(layers[0].parameters())
        seen.append((output.dtype, other.dtype == torch.bfloat16))

    layers[1].mlp.down_proj.register_forward_hook(look)
    samples = random_samples(6)
    scores = learner.score(samples)
    before = {name: weight.to_local().clone() for name, weight in learner.named_weights().items()}
    metrics = learner.update(with_old_logprobs(samples, scores), iteration=0)
    assert seen
    assert set(seen) == {(torch.bfloat16, False)}
    after = {name: weight.to_local() for name, weight in learner.named_weights().items()}
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert_learnt([metrics["grad_norm"]], before, after)
    # The engine has bf16 weights; the metrics of its difference begin with this one.
    exact = make_learner(tmp_path, precision="fp32").score(samples)
    largest = max(
        float(abs(ours - theirs).max()) for ours, theirs in zip(scores, exact, strict=True)
    )
    assert 0 < largest < 0.5
