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
    )


def split(inputs: LossInputs) -> list[dict[str, torch.Tensor]]:
    """The same tokens, episode by episode, in float64 and cut off from the graph."""
    names = ("logprobs", "old_logprobs", "advantages", "importance_weights")
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
    assert inputs.importance_weights is not None
    shuffled = LossInputs(
        inputs.logprobs[order],
        inputs.old_logprobs[order],
        inputs.advantages[order],
        inputs.episode_index[order],
        3,
        inputs.importance_weights[order],
    )
    loss = POLICY_LOSSES.build(spec)
    torch.testing.assert_close(loss.per_token(shuffled)[0], loss.per_token(inputs)[0][order])


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
