"""The learning rate as a function of the iteration; AdamW by parameter name; what is decayed."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from earl_core.config.update import UpdateConfig
from earl_core.learner.state import optimizer as optimizers
from earl_core.learner.state.optimizer import PolicyOptimizer, learning_rate
from earl_core.tensors.device_copies import on_device
from earl_core.tensors.slices import buckets
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


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_steps_are_those_of_torch_with_only_matrices_decayed(
    kind: str, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloaded: through copies, as on a GPU, in some buckets."""
    if offload:
        monkeypatch.setattr(PolicyOptimizer, "_on_host", True)
        monkeypatch.setattr(optimizers, "buckets", partial(buckets, most=10_000))
    ours, theirs = build_model(kind), build_model(kind)
    config = UpdateConfig(weight_decay=0.1, learning_rate=1e-2)
    optimizer = PolicyOptimizer(ours.named_parameters(), config, offload=offload)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
    assert optimizer.state == {}
    for number in range(3):
        torch.manual_seed(number)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.learning_rate = reference.param_groups[0]["lr"] = 1e-2 / (number + 1)
        reference.param_groups[1]["lr"] = optimizer.learning_rate
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in ours.parameters())
    names = dict(ours.named_parameters())
    assert set(optimizer.state) == set(names)
    for name, other in theirs.named_parameters():
        assert torch.equal(names[name], other), name
        for key, value in reference.state[other].items():
            assert torch.equal(optimizer.state[name][key], value), (name, key)


def test_a_parameter_without_gradient_stays_and_loaded_state_is_used() -> None:
    model = build_model("llama")
    parameters = dict(model.named_parameters())
    first, second = list(parameters)[:2]
    optimizer = PolicyOptimizer(parameters.items(), UpdateConfig(weight_decay=0.5))
    before = parameters[first].detach().clone()
    parameters[second].grad = torch.ones_like(parameters[second])
    state = {
        "step": torch.tensor(4.0),
        "exp_avg": torch.zeros_like(parameters[second]),
        "exp_avg_sq": torch.zeros_like(parameters[second]),
    }
    optimizer.load_state(second, state)
    optimizer.step()
    assert torch.equal(parameters[first], before)
    assert set(optimizer.state) == {second}
    assert float(optimizer.state[second]["step"]) == 5.0
    optimizer.bind(parameters.items())
    assert optimizer.state == {}


def test_what_goes_through_a_device_comes_before_its_turn_and_leaves_after_it() -> None:
    hosts = [torch.full((4,), float(number)) for number in range(5)]
    order: list[str] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def tensors_of(number: int) -> list[torch.Tensor]:
        order.append(f"copy {number}")
        return [hosts[number]]

    def act(number: int, here: list[torch.Tensor]) -> None:
        order.append(f"act {number}")
        assert here[0].data_ptr() != hosts[number].data_ptr()
        here[0] += 10
        held.append(weakref.ref(here[0]))
        assert sum(each() is not None for each in held) <= 2, "another is on its way"

    on_device(range(5), tensors_of, act, torch.device("cpu"))
    assert [float(host[0]) for host in hosts] == [10, 11, 12, 13, 14]
    acts = [order.index(f"act {number}") for number in range(5)]
    assert acts == sorted(acts)
    for number in range(1, 5):
        # It is asked for before the one before it has its turn.
        assert order.index(f"copy {number}") < acts[number - 1]
