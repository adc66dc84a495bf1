"""Mixed precision: what it holds, and what it computes in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from earl_core.learner.parallel_model import ParallelModel
from tests.learner.helpers import random_samples, save_model, with_old_logprobs
from tests.learner.test_policy_learner import make_learner
from tests.learnt import assert_learnt


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
