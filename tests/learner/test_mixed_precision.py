"""Mixed precision: what it holds, and what it computes in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from earl_core.learner.parallel_model import ParallelModel
from earl_core.system.memory import OutOfMemory
from earl_core.tensors.slices import local_part
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
    before = {name: local_part(weight).clone() for name, weight in learner.named_weights().items()}
    metrics = learner.update(with_old_logprobs(samples, scores), iteration=0)
    assert seen
    assert set(seen) == {(torch.bfloat16, False)}
    after = {name: local_part(weight) for name, weight in learner.named_weights().items()}
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert_learnt([metrics["grad_norm"]], before, after)
    # The engine has bf16 weights; the metrics of its difference begin with this one.
    exact = make_learner(tmp_path, precision="fp32").score(samples)
    largest = max(
        float(abs(ours - theirs).max()) for ours, theirs in zip(scores, exact, strict=True)
    )
    assert 0 < largest < 0.5


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_update_that_memory_cut_off_leaves_nothing_to_the_next_one(
    kind: str, where: str, tmp_path: Path
) -> None:
    save_model(kind, tmp_path)
    settings = {"precision": "bf16", "epsilon": 1e-2, "learning_rate": 0.1, "max_mismatch": 10}
    once, again = (make_learner(tmp_path, **settings) for _ in range(2))
    layer, calls = again.parallel.model.model.layers[1].mlp, []

    def refuse(*given: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = (
        layer.register_forward_hook(refuse)
        if where == "forward"
        else layer.register_full_backward_hook(refuse)
    )
    samples = random_samples(12)
    with pytest.raises(OutOfMemory):
        again.update(samples, iteration=0)
    hook.remove()
    norms = [each.update(samples, iteration=0)["grad_norm"] for each in (once, again)]
    assert norms[0] == norms[1] > 0.1
    theirs = again.named_weights()
    for name, weight in once.named_weights().items():
        assert torch.equal(local_part(weight), local_part(theirs[name])), name
