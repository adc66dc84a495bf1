"""What the reference itself does where its formulas end."""

from __future__ import annotations

import torch

from tests.conformance.reference import Optimized


def test_a_gradient_of_zeros_moves_nothing_but_what_decays() -> None:
    """An iteration may have nothing to learn from: all rewards of each group are equal."""
    options = {"max_grad_norm": 0.5, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
    decays = {"learning_rate": 0.1, "weight_decay": 0.5}
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    assert Optimized(model, {**options, **decays}).step() == 0.0
    assert torch.equal(model.bias, before["bias"])
    assert torch.allclose(model.weight, before["weight"] * 0.95, rtol=1e-12)
