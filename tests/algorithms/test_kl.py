"""KL estimators, importance correction and entropy bonus: values and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from earl_core.algorithms.aggregation import AGGREGATIONS, Totals
from earl_core.algorithms.importance import ImportanceCorrection, mismatch_metrics
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.objective import Objective
from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from earl_core.config.algorithm import KLConfig
from tests.algorithms.reference import kl_term, verl_low_var_kl

NAMES = ("k1", "k2", "k3")
logprob = st.floats(-8.0, 0.0, width=32)
pairs = st.lists(st.tuples(logprob, logprob), max_size=12)


@pytest.mark.parametrize("name", NAMES)
@given(batch=pairs)
def test_values_on_arrays_and_tensors(name: str, batch: list[tuple[float, float]]) -> None:
    now = np.array([a for a, _ in batch])
    reference = np.array([b for _, b in batch])
    estimator = KL_ESTIMATORS.build(name)
    array = estimator.values(now, reference)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == pytest.approx([kl_term(name, a, b) for a, b in batch], abs=1e-9)
    tensor = estimator.values(torch.from_numpy(now), torch.from_numpy(reference))
    np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-12, atol=1e-12)
    in_loss = estimator.loss(torch.from_numpy(now), torch.from_numpy(reference))
    np.testing.assert_allclose(in_loss.numpy(), array, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("difference", [1e-3, 1e-5, -1e-4])
def test_small_divergences_keep_their_digits_in_float32(difference: float) -> None:
    estimate = KL_ESTIMATORS.build("k3").values(
        np.array([difference], dtype=np.float32), np.zeros(1, dtype=np.float32)
    )
    assert estimate.dtype == np.float32
    assert estimate[0] == pytest.approx(difference**2 / 2, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("difference", [-1e3, 1e3])
def test_extremes_stay_finite(name: str, difference: float) -> None:
    now = torch.tensor([difference], requires_grad=True)
    loss = KL_ESTIMATORS.build(name).loss(now, torch.zeros(1))
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert torch.isfinite(loss).all()
    assert torch.isfinite(now.grad).all()


def exact(logits: torch.Tensor, reference: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Gradient of KL(pi || ref) or, not reverse, KL(ref || pi) in the logits of pi, by autograd."""
    leaf = logits.clone().requires_grad_()
    now, other = leaf.log_softmax(-1), reference.log_softmax(-1)
    kl = (now.exp() * (now - other)) if reverse else (other.exp() * (other - now))
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize(("name", "reverse"), [("k1", True), ("k2", True), ("k3", False)])
def test_the_expected_gradient_is_that_of_a_divergence(name: str, reverse: bool) -> None:
    """Exactly, by enumerating all tokens of a small vocabulary with the policy's probabilities."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64)
    reference = torch.tensor([-0.5, 0.4, 0.1, 0.9], dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    now = leaf.log_softmax(-1)
    per_token = KL_ESTIMATORS.build(name).loss(now, reference.log_softmax(-1))
    (now.exp().detach() * per_token).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(leaf.grad, exact(logits, reference, reverse))


def test_k3_is_verls_with_its_clamp_in_value_and_gradient() -> None:
    differences = torch.linspace(-25, 25, 401, dtype=torch.float64)
    found, expected = ((differences - 2).requires_grad_() for _ in range(2))
    reference = torch.full_like(differences, -2.0)
    loss = KL_ESTIMATORS.build("k3").loss(found, reference)
    theirs = verl_low_var_kl(expected, reference)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    theirs.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(found.grad, expected.grad)


def test_a_token_far_from_the_reference_does_not_own_the_update() -> None:
    """One of a hundred lies 12 nats below it; its gradient was 2,500 times the others' sum."""
    now = torch.full((100,), -1.0)
    now[7] = -13.0
    leaf = now.requires_grad_()
    target = Objective(
        POLICY_LOSSES.build("policy_gradient"),
        AGGREGATIONS.build("token_mean"),
        KL_ESTIMATORS.build("k3"),
        1.0,
    )
    zeros = torch.zeros(100)
    inputs = LossInputs(leaf, leaf.detach(), zeros, torch.zeros(100, dtype=torch.int64), 1, None)
    result = target.microbatch(
        inputs, torch.tensor([100]), Totals(100, 1), reference_logprobs=torch.full((100,), -1.5)
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert float(leaf.grad.norm()) < 0.1
    assert float(leaf.grad[7]) == 0.0
    assert float(result.metrics["kl_bounded_share"]) == pytest.approx(0.01)
    assert float(result.loss) < 0.3


def test_the_reward_takes_k1_by_default_whose_policy_gradient_is_the_divergences() -> None:
    """Exactly: sum over tokens of p * penalty * grad log p, as REINFORCE estimates it."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64)
    reference = torch.tensor([-0.5, 0.4, 0.1, 0.9], dtype=torch.float64)

    def policy_gradient(name: str) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        now = leaf.log_softmax(-1)
        penalty = KL_ESTIMATORS.build(name).values(now.detach(), reference.log_softmax(-1))
        (now.exp().detach() * penalty * now).sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    in_reward = KLConfig.model_validate({"placement": "reward", "coefficient": 0.1})
    torch.testing.assert_close(
        policy_gradient(in_reward.estimator), exact(logits, reference, reverse=True)
    )
    assert not torch.allclose(policy_gradient("k3"), exact(logits, reference, reverse=True))
    assert KLConfig(placement="loss", coefficient=0.1).estimator == "k3"
    assert KLConfig().estimator == "k3"


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_expected_value_is_the_divergence(name: str) -> None:
    now = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64).log_softmax(-1)
    reference = torch.tensor([-0.5, 0.4, 0.1, 0.9], dtype=torch.float64).log_softmax(-1)
    values = KL_ESTIMATORS.build(name).values(now, reference)
    expected = (now.exp() * (now - reference)).sum()
    torch.testing.assert_close((now.exp() * values).sum(), expected)


@given(batch=pairs, cap=st.floats(0.5, 5.0))
def test_token_weights(batch: list[tuple[float, float]], cap: float) -> None:
    old = torch.tensor([a for a, _ in batch], requires_grad=True)
    rollout = torch.tensor([b for _, b in batch])
    index = torch.zeros(len(batch), dtype=torch.int64)
    weights = ImportanceCorrection(cap=cap).weights(old, rollout, index, 1)
    assert not weights.requires_grad
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(
        [min(math.exp(a - b), cap) for a, b in batch], rel=1e-4
    )


def test_sequence_weights_are_the_product_over_the_episode() -> None:
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    rollout = torch.tensor([-1.1, -1.5, -0.5, -9.0])
    index = torch.tensor([0, 1, 0, 1])
    weights = ImportanceCorrection(cap=2.0, level="sequence").weights(old, rollout, index, 2)
    assert weights.tolist() == pytest.approx([math.exp(0.1), 2.0, math.exp(0.1), 2.0], rel=1e-5)
    far = torch.tensor([500.0, 0.0, 0.0, -500.0])
    extreme = ImportanceCorrection(cap=2.0).weights(far, torch.zeros(4), index, 2)
    assert torch.isfinite(extreme).all()


def test_corrected_expectation_is_the_trainers() -> None:
    """E_engine[w f] = E_trainer[f] while no weight reaches the cap."""
    engine = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    trainer = torch.tensor([0.15, 0.15, 0.7], dtype=torch.float64)
    index = torch.zeros(3, dtype=torch.int64)
    weights = ImportanceCorrection(cap=2.0).weights(trainer.log(), engine.log(), index, 1)
    value = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close((engine * weights * value).sum(), (trainer * value).sum())


def test_mismatch_metrics() -> None:
    rollout = np.linspace(-3, -1, 101, dtype=np.float32)
    difference = np.linspace(-0.2, 0.3, 101, dtype=np.float32)
    for old in (rollout + difference, torch.from_numpy(rollout + difference).requires_grad_()):
        found = mismatch_metrics(old, rollout, np.arange(101))
        assert found["mismatch_mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-4)
        assert found["mismatch_p95"] == pytest.approx(
            np.percentile(np.abs(difference), 95), rel=1e-4
        )
        assert found["mismatch_max"] == pytest.approx(0.3, rel=1e-4)
        assert found["mismatch_kl"] == pytest.approx(
            np.mean(np.exp(difference) - 1 - difference), rel=1e-3
        )
        late, early = np.abs(difference[51:]).mean(), np.abs(difference[:51]).mean()
        assert found["mismatch_growth"] == pytest.approx(late / early, rel=1e-4)
    assert mismatch_metrics([], [], []) == {}
    same = mismatch_metrics(torch.zeros(2).bfloat16(), np.zeros(2), [3, 3])
    assert (same["mismatch_max"], same["mismatch_growth"]) == (0.0, 1.0)


def test_the_entropy_bonus_pushes_up_entropy() -> None:
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    tokens = LossInputs(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), 1)
    parts = POLICY_LOSSES.build("policy_gradient"), AGGREGATIONS.build("token_mean")
    found = Objective(*parts, entropy_coefficient=0.1).microbatch(
        tokens, torch.tensor([2]), Totals(2, 1), entropy=entropy
    )
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])
