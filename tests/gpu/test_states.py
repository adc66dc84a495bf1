"""Layers with a state over packs on the device: plain torch forms, and kernels where installed."""

from __future__ import annotations

import torch

from earl_core.learner.data.prefix_tree import build_tree, separate
from earl_core.learner.model import prepare_for_packing
from tests.learner.state_models import build_hybrid, forked_samples, losses


def learnt(device: torch.device, dtype: torch.dtype, *, shared: bool) -> dict[str, torch.Tensor]:
    """Log-probs of all tokens under "", and the gradients of their mean; float32 on the CPU."""
    model = build_hybrid("Qwen3_5").to(device=device, dtype=dtype)
    prepare_for_packing(model)
    samples = forked_samples()
    tree = build_tree(samples, 1) if shared else separate([len(each) for each in samples])
    found = losses(model, samples, tree)
    found.mean().backward()  # type: ignore[no-untyped-call]
    parts = {"": found.detach()}
    for name, each in model.named_parameters():
        assert each.grad is not None
        assert each.grad.abs().max() > 0
        parts[name] = each.grad
    return {name: part.float().cpu() for name, part in parts.items()}


def test_trees_equal_single_samples_in_float32_and_in_bf16(device: torch.device) -> None:
    """In bf16 (on a GPU with kernels, where they are installed) a tree is as close to float32."""
    exact = learnt(torch.device("cpu"), torch.float32, shared=False)
    whole = learnt(device, torch.float32, shared=True)
    tree, alone = (learnt(device, torch.bfloat16, shared=each) for each in (True, False))
    for name, expected in exact.items():
        torch.testing.assert_close(whole[name], expected, atol=5e-5, rtol=0)
        distance = [float((each[name] - expected).norm()) for each in (tree, alone)]
        assert 0 < distance[0] <= 2 * distance[1] + 1e-3, name
