"""Policy losses: values, gradients and diagnostics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from tests.algorithms.reference import policy_terms

SPECS: list[dict[str, Any]] = [
    {"name": "policy_gradient"},
    {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    {"name": "ppo_clip", "clip_low": 0.3, "clip_high": 0.05, "dual_clip": 1.1},
    {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    {"name": "gspo", "clip_low": 0.1, "clip_high": 0.3},
    {"name": "cispo", "clip_high": 4.0},
    {"name": "cispo", "clip_high": 0.1},
    {"name": "dppo", "mask_low": 0.2, "mask_high": 0.2},
    {"name": "dppo", "mask_low": 0.01, "mask_high": 0.05},
    {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
    {"name": "sapo", "tau_positive": 5.0, "tau_negative": 20.0},
]
every_loss = pytest.mark.parametrize("spec", SPECS, ids=lambda s: "-".join(map(str, s.values())))


def make(seed: int, counts: list[int], spread: float = 0.3) -> LossInputs:
    """Random tokens of episodes with these numbers of tokens, one advantage per episode."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    old = -torch.rand(total, generator=generator) * 3
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return LossInputs(
        logprobs=(old + torch.randn(total, generator=generator) * spread).requires_grad_(),
        old_logprobs=old,
        advantages=torch.randn(len(counts), generator=generator)[index],
        episode_index=index,
        n_episodes=len(counts),
        importance_weights=torch.rand(total, generator=generator) * 2,
        rollout_logprobs=old + torch.randn(total, generator=generator) * spread / 10,
    )


def taken(inputs: LossInputs, tokens: torch.Tensor) -> LossInputs:
    """These tokens, of the same number of episodes."""
    assert inputs.importance_weights is not None
    assert inputs.rollout_logprobs is not None
    return LossInputs(
        inputs.logprobs[tokens],
        inputs.old_logprobs[tokens],
        inputs.advantages[tokens],
        inputs.episode_index[tokens],
        inputs.n_episodes,
        inputs.importance_weights[tokens],
        inputs.rollout_logprobs[tokens],
    )


def split(inputs: LossInputs) -> list[dict[str, torch.Tensor]]:
    """The same tokens, episode by episode, in float64 and cut off from the graph."""
    names = (*("logprobs", "old_logprobs", "advantages", "importance_weights", "rollout_logprobs"),)
    return [
        {n: getattr(inputs, n).detach().double()[inputs.episode_index == e] for n in names}
        for e in range(inputs.n_episodes)
    ]


@every_loss
@given(seed=st.integers(0, 10**6), counts=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_against_plain_scalars(spec: dict[str, Any], seed: int, counts: list[int]) -> None:
    inputs = make(seed, counts)
    loss, diagnostics = POLICY_LOSSES.build(spec).per_token(inputs)
    assert loss.dtype == torch.float32
    assert loss.shape == inputs.logprobs.shape
    episodes = split(inputs)
    for episode in episodes:
        episode["logprobs"].requires_grad_()
    expected = [policy_terms(spec, episode) for episode in episodes]
    flat = torch.stack([term for terms in expected for term in terms])
    torch.testing.assert_close(loss.double(), flat, rtol=1e-5, atol=1e-6)
    for tensor in diagnostics.values():
        assert not tensor.requires_grad
        assert tensor.shape == loss.shape


@every_loss
@given(seed=st.integers(0, 10**6), counts=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_gradients_against_plain_scalars(
    spec: dict[str, Any], seed: int, counts: list[int]
) -> None:
    """With equal weights within an episode, as aggregations give: GSPO's two forms agree there."""
    inputs = make(seed, counts)
    assert inputs.importance_weights is not None
    even = torch.rand(len(counts), generator=torch.Generator().manual_seed(seed))
    inputs.importance_weights.copy_(even[inputs.episode_index])
    POLICY_LOSSES.build(spec).per_token(inputs)[0].sum().backward()  # type: ignore[no-untyped-call]
    episodes = split(inputs)
    for episode in episodes:
        episode["logprobs"].requires_grad_()
        torch.stack(policy_terms(spec, episode)).sum().backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([e["logprobs"].grad for e in episodes])  # type: ignore[misc]
    assert inputs.logprobs.grad is not None
    torch.testing.assert_close(inputs.logprobs.grad.double(), expected, rtol=1e-4, atol=1e-5)


@every_loss
@given(seed=st.integers(0, 10**6), data=st.data())
def test_the_order_of_tokens_does_not_matter(
    spec: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    inputs = make(seed, [3, 1, 4])
    order = torch.tensor(data.draw(st.permutations(range(8))))
    shuffled = taken(inputs, order)
    loss = POLICY_LOSSES.build(spec)
    torch.testing.assert_close(loss.per_token(shuffled)[0], loss.per_token(inputs)[0][order])


@every_loss
@given(seed=st.integers(0, 10**6), data=st.data())
def test_token_wise_says_whether_a_token_is_alone(
    spec: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    inputs, loss = make(seed, [3, 1, 4], spread=0.5), POLICY_LOSSES.build(spec)
    some = torch.tensor(data.draw(st.permutations(range(8)))[: data.draw(st.integers(1, 7))])
    whole, part = loss.per_token(inputs)[0][some], loss.per_token(taken(inputs, some))[0]
    if loss.token_wise:
        torch.testing.assert_close(part, whole, rtol=0, atol=0)
    else:
        assert spec["name"] == "gspo"


def test_the_first_step_is_the_policy_gradient_for_all() -> None:
    """At pi = pi_old every loss has the gradient -A grad log pi."""
    for spec in SPECS:
        inputs = make(3, [2, 3], spread=0.0)
        loss, diagnostics = POLICY_LOSSES.build(spec).per_token(inputs)
        loss.sum().backward()  # type: ignore[no-untyped-call]
        assert inputs.importance_weights is not None
        torch.testing.assert_close(
            inputs.logprobs.grad, -inputs.advantages * inputs.importance_weights
        )
        assert (diagnostics["ratio"] == 1).all()
        assert (diagnostics["update_kl"] == 0).all()
        assert not diagnostics.get("clip_fraction", torch.zeros(1)).any()


def one_token(log_ratio: float, advantage: float) -> LossInputs:
    return LossInputs(
        torch.tensor([-1.0 + log_ratio], requires_grad=True),
        torch.tensor([-1.0]),
        torch.tensor([advantage]),
        torch.tensor([0]),
        1,
        rollout_logprobs=torch.tensor([-1.0]),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "dual"),
    [
        (1.1, 2.0, -2.2, 0, 0),
        (1.5, 2.0, -2.56, 1, 0),  # above 1 + clip_high: no more gain
        (0.5, 2.0, -1.0, 0, 0),  # below, but the gradient leads back
        (0.5, -2.0, 1.6, 1, 0),  # below 1 - clip_low: no more gain
        (1.5, -2.0, 3.0, 0, 0),
        (9.0, -2.0, 6.0, 0, 1),  # the dual clip bounds the loss
    ],
)
def test_the_corners_of_ppo(
    ratio: float, advantage: float, loss: float, clipped: int, dual: int
) -> None:
    spec = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    inputs = one_token(math.log(ratio), advantage)
    found, diagnostics = POLICY_LOSSES.build(spec).per_token(inputs)
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert diagnostics["clip_fraction"].item() == clipped
    assert diagnostics["dual_clip_fraction"].item() == dual
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    moves = 0.0 if clipped or dual else -advantage * ratio
    assert inputs.logprobs.grad.item() == pytest.approx(moves, rel=1e-5)


@every_loss
@pytest.mark.parametrize("log_ratio", [-1e4, -90.0, 90.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_huge_ratios_stay_finite(spec: dict[str, Any], log_ratio: float, advantage: float) -> None:
    inputs = one_token(log_ratio, advantage)
    loss, diagnostics = POLICY_LOSSES.build(spec).per_token(inputs)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    for tensor in (loss, inputs.logprobs.grad, *diagnostics.values()):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize(("ratio", "weight", "clipped"), [(0.01, 0.01, 0), (3, 3, 0), (9, 5, 1)])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(
    ratio: float, weight: float, clipped: int, advantage: float
) -> None:
    inputs = one_token(math.log(ratio), advantage)
    loss, diagnostics = POLICY_LOSSES.build("cispo").per_token(inputs)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.item() == pytest.approx(-weight * advantage, rel=1e-5)
    assert diagnostics["clip_fraction"].item() == clipped


@pytest.mark.parametrize(
    ("sampled", "now", "advantage", "masked"),
    [
        (0.5, 0.69, 1.0, 0),
        (0.5, 0.71, 1.0, 1),  # gained too much
        (0.5, 0.71, -1.0, 0),  # the gradient leads back
        (0.5, 0.39, -1.0, 1),  # lost too much
        (0.5, 0.39, 1.0, 0),
        (0.001, 0.05, 1.0, 0),  # fifty times as likely, but little in sum
    ],
)
def test_dppo_masks_by_probability_since_sampling(
    sampled: float, now: float, advantage: float, masked: int
) -> None:
    inputs = LossInputs(
        torch.tensor([math.log(now)], requires_grad=True),
        torch.tensor([math.log(now)]),  # the policy before this update matters not
        torch.tensor([advantage]),
        torch.tensor([0]),
        1,
        rollout_logprobs=torch.tensor([math.log(sampled)]),
    )
    loss = POLICY_LOSSES.build({"name": "dppo", "mask_low": 0.1})
    found, diagnostics = loss.per_token(inputs)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    expected = 0.0 if masked else -advantage * now / sampled
    assert inputs.logprobs.grad.item() == pytest.approx(expected, rel=1e-5)
    assert diagnostics["clip_fraction"].item() == masked


def test_dppo_says_that_it_needs_the_engines_log_probs() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="needs `rollout_logprobs`"):
        POLICY_LOSSES.build("dppo").per_token(LossInputs(zeros, zeros, zeros, zeros.long(), 1))


@pytest.mark.parametrize("ratio", [0.2, 0.8, 1.0, 1.3, 4.0])
@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 3.0), (-2.0, 7.0)])
def test_sapo_gates_by_a_bell_around_the_old_policy(
    ratio: float, advantage: float, tau: float
) -> None:
    """Equation of the gradient's weight in arXiv 2511.20347: sech^2(tau (r - 1) / 2)."""
    inputs = one_token(math.log(ratio), advantage)
    loss = POLICY_LOSSES.build({"name": "sapo", "tau_positive": 3.0, "tau_negative": 7.0})
    found, diagnostics = loss.per_token(inputs)
    found.sum().backward()  # type: ignore[no-untyped-call]
    gate = 1 / math.cosh(tau * (ratio - 1) / 2) ** 2
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.item() == pytest.approx(
        -gate * ratio * advantage, rel=1e-4, abs=1e-5
    )
    assert diagnostics["gate"].item() == pytest.approx(gate, rel=1e-4, abs=1e-6)


def test_gspo_clips_an_episode_as_a_whole() -> None:
    old = torch.full((4,), -1.0)
    now = (old + torch.tensor([0.5, -0.5, 0.3, 0.3])).requires_grad_()
    index = torch.tensor([0, 0, 1, 1])
    inputs = LossInputs(now, old, torch.ones(4), index, 2)
    loss, diagnostics = POLICY_LOSSES.build(
        {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1}
    ).per_token(inputs)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert diagnostics["clip_fraction"].tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(
        diagnostics["sequence_ratio"], torch.tensor([0.0, 0.0, 0.3, 0.3]).exp()
    )
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1, -1, 0, 0])


def test_gspo_with_token_advantages_is_gspo_token() -> None:
    """Gradient of equation 13 of arXiv 2507.18071: s A_t for each token."""
    old, now = torch.full((2,), -1.0), torch.tensor([-0.9, -1.3], requires_grad=True)
    inputs = LossInputs(now, old, torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), 1)
    loss = POLICY_LOSSES.build({"name": "gspo", "clip_low": 0.5, "clip_high": 0.5})
    loss.per_token(inputs)[0].sum().backward()  # type: ignore[no-untyped-call]
    ratio = math.exp(-0.1)
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-ratio, -3 * ratio], rel=1e-5)


def test_half_precision_log_probs_are_computed_in_float32() -> None:
    inputs = make(1, [3])
    low = LossInputs(
        inputs.logprobs.bfloat16(),
        inputs.old_logprobs.bfloat16(),
        inputs.advantages,
        inputs.episode_index,
        1,
        rollout_logprobs=inputs.old_logprobs.bfloat16(),
    )
    for spec in SPECS:
        assert POLICY_LOSSES.build(spec).per_token(low)[0].dtype == torch.float32


def test_tensors_that_do_not_fit_are_refused() -> None:
    four, three = torch.zeros(4), torch.zeros(3)
    index = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"`advantages` has shape \(3,\)"):
        LossInputs(four, four, three, index, 1)
    with pytest.raises(ValueError, match=r"`old_logprobs` has shape \(1, 4\)"):
        LossInputs(four[None], four[None], four[None], index[None], 1)
