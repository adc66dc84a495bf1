"""The learning rate as a function of the iteration, and what is decayed."""

from __future__ import annotations

import pytest

from earl_core.config.update import UpdateConfig
from earl_core.learner.optimizer import build_optimizer, learning_rate
from tests.learner.helpers import build_model


def _rates(iterations: int, **settings: object) -> list[float]:
    config = UpdateConfig(learning_rate=1.0, **settings)
    return [learning_rate(config, iteration, iterations) for iteration in range(iterations)]


def test_schedules() -> None:
    assert _rates(3) == [1.0, 1.0, 1.0]
    assert _rates(4, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert _rates(4, schedule="cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])
    warm = _rates(6, schedule="linear", warmup_iterations=2)
    assert warm == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert learning_rate(UpdateConfig(schedule="linear"), 99, 4) == 0.0


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_only_matrices_are_decayed_and_tied_weights_appear_once(kind: str) -> None:
    model = build_model(kind)
    optimizer = build_optimizer(model, UpdateConfig(weight_decay=0.1))
    decayed, plain = optimizer.param_groups
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert decayed["weight_decay"] == 0.1
    assert all(p.ndim == 1 for p in plain["params"])
    assert plain["weight_decay"] == 0.0
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert owned == {id(p) for p in model.parameters()}
