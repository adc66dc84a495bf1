"""The head's log-probs, entropies and gradients, whatever the chunks, against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from earl_core.learner.lm_head import EntropyMode
from earl_core.learner.target_masks import TargetMasks
from earl_core.learner.token_logprobs import HeadScore
from earl_core.pretrained.logit_transform import NO_TRANSFORM, LogitTransform

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HIDDEN = 512, 48

Found = dict[str, torch.Tensor]


def inputs(vocabulary: int, *, copies: int = 1) -> tuple[torch.Tensor, ...]:
    """States, predictors (each state's as many times), targets, and the two outputs' gradients."""
    random = torch.Generator().manual_seed(vocabulary)
    states = torch.randn(TOKENS // copies, HIDDEN, generator=random)
    predictors = torch.arange(TOKENS) % len(states)
    targets = torch.randint(0, vocabulary, (TOKENS,), generator=random)
    return states, predictors, targets, *torch.randn(2, TOKENS, generator=random)


def linear(vocabulary: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(vocabulary)
    head = nn.Linear(HIDDEN, vocabulary, bias=bias)
    nn.init.normal_(head.weight, std=0.2)
    return head


def gradients(head: nn.Linear, states: torch.Tensor) -> Found:
    assert states.grad is not None
    found = {name: parameter.grad for name, parameter in head.named_parameters()}
    assert all(each is not None and each.abs().max() > 0 for each in found.values())
    return {"states": states.grad, **{name: g for name, g in found.items() if g is not None}}


def masks(vocabulary: int, targets: torch.Tensor) -> tuple[TargetMasks, torch.Tensor]:
    """Masks of every second target, and what they allow, bool [T', vocabulary]. Every eighth one
    allows the target alone."""
    random = torch.Generator().manual_seed(vocabulary)
    allowed = torch.rand(TOKENS, vocabulary, generator=random) < 0.3
    allowed[::8] = False
    allowed[torch.arange(TOKENS), targets] = True
    bits = np.zeros((TOKENS, 32 * -(-vocabulary // 32)), np.uint8)
    bits[:, :vocabulary] = allowed
    rows = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view("<i4"))
    index = torch.where(torch.arange(TOKENS) % 2 == 0, torch.arange(TOKENS), -1)
    allowed[1::2] = True
    return TargetMasks(rows, index), allowed


def ours(head: nn.Linear, score: HeadScore, *, copies: int = 1, masked: bool = False) -> Found:
    states, predictors, targets, *towards = inputs(head.out_features, copies=copies)
    head.zero_grad()
    states.requires_grad_()
    held = masks(head.out_features, targets)[0] if masked else None
    logprobs, entropies = score(head, states, predictors, targets, held)
    loss = (logprobs * towards[0]).sum()
    found = {"logprobs": logprobs.detach()}
    assert (entropies is None) == (score.entropy == "none")
    if entropies is not None:
        assert entropies.requires_grad == (score.entropy == "differentiable")
        found["entropies"] = entropies.detach()
        if entropies.requires_grad:
            loss = loss + (entropies * towards[1]).sum()
    torch.autograd.backward(loss)
    return found | gradients(head, states)


def exact(like: nn.Linear, score: HeadScore, *, copies: int = 1, masked: bool = False) -> Found:
    """All at once and in float64."""
    head = nn.Linear(HIDDEN, like.out_features, bias=like.bias is not None).double()
    head.load_state_dict(like.state_dict())
    states, predictors, targets, *towards = inputs(head.out_features, copies=copies)
    states = states.double().requires_grad_()
    logits = head(states[predictors]) * score.transform.scale
    if (cap := score.transform.cap) is not None:
        logits = torch.tanh(logits / cap) * cap
    logits = logits / score.temperature
    allowed = masks(head.out_features, targets)[1] if masked else torch.ones_like(logits) > 0
    whole = torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), dim=-1)
    logprobs = whole.gather(1, targets[:, None])[:, 0]
    entropies = -(whole.exp() * whole.masked_fill(~allowed, 0.0)).sum(-1)
    loss = (logprobs * towards[0]).sum()
    if score.entropy == "differentiable":
        loss = loss + (entropies * towards[1]).sum()
    torch.autograd.backward(loss)
    found = {"logprobs": logprobs.detach(), "entropies": entropies.detach()}
    return found | gradients(head, states)


def errors(found: Found, expected: Found) -> dict[str, float]:
    """Relative, by norms."""
    return {
        name: float((value.double() - expected[name]).norm() / expected[name].norm())
        for name, value in found.items()
    }


@pytest.mark.parametrize("entropy", ["none", "detached", "differentiable"])
@pytest.mark.parametrize(
    ("temperature", "bias", "masked", "transform"),
    [
        (1.0, False, False, NO_TRANSFORM),
        (0.7, True, False, NO_TRANSFORM),
        (0.7, True, True, NO_TRANSFORM),
        (0.7, True, True, LogitTransform(scale=0.3)),
        # Of results up to 7.
        (0.7, True, True, LogitTransform(scale=1.3, cap=4.0)),
    ],
    ids=["plain", "bias", "masked", "scaled", "capped"],
)
def test_float32_is_exact_in_any_chunks(
    entropy: EntropyMode, temperature: float, bias: bool, masked: bool, transform: LogitTransform
) -> None:
    head = linear(300, bias=bias)
    score = HeadScore(temperature, entropy, transform=transform)
    expected = exact(head, score, masked=masked)
    for chunk in (None, 200, 7):
        found = ours(head, dataclasses.replace(score, chunk_tokens=chunk), masked=masked)
        assert max(errors(found, expected).values()) < 1e-6, chunk
        # Of what alone is allowed.
        assert not masked or found["logprobs"][::8].abs().max() < 1e-7


@pytest.mark.parametrize("entropy", ["detached", "differentiable"])
@pytest.mark.parametrize("copies", [1, 64])
def test_chunks_and_copies_do_not_add_to_the_error_of_bf16(
    entropy: EntropyMode, copies: int
) -> None:
    """128 chunks against one; and where 64 tokens are predicted from one state, as those after a
    shared prefix are, against one from each.
    """
    head = linear(2000, bias=True).bfloat16()
    score = HeadScore(0.9, entropy)
    one = errors(ours(head, score), exact(head, score))
    many = HeadScore(0.9, entropy, chunk_tokens=TOKENS // 128)
    cut = errors(ours(head, many, copies=copies), exact(head, many, copies=copies))
    assert one["weight"] > 1e-4
    for name in ("weight", "states"):
        assert cut[name] <= 1.2 * one[name], name


def test_what_is_kept_between_the_passes_is_one_chunk() -> None:
    head, score = linear(2000, bias=False), HeadScore(entropy="detached", chunk_tokens=16)
    states, predictors, targets, *_ = inputs(2000)
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        score(head, states.requires_grad_(), predictors, targets)
    assert kept < 4 * (16 * 2000 + 2000 * HIDDEN + TOKENS * (HIDDEN + 16))


def test_a_second_backward_pass_is_refused_and_never_wrong() -> None:
    """The first one writes into what was kept."""
    states, predictors, targets, *_ = inputs(300)
    logprobs, _ = HeadScore()(linear(300, bias=False), states, predictors, targets)
    logprobs.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()  # type: ignore[no-untyped-call]


def test_no_token_to_score_leaves_gradients_of_zero() -> None:
    """As on a context rank that has none of a pack's trained tokens."""
    head = linear(300, bias=True)
    states = torch.randn(5, HIDDEN, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    logprobs, entropies = HeadScore(entropy="detached")(head, states, none, none)
    assert entropies is not None
    assert logprobs.shape == entropies.shape == (0,)
    torch.autograd.backward(logprobs.sum())
    for each in (states, *head.parameters()):
        assert each.grad is not None
        assert not each.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_passes_compute_the_same(dtype: torch.dtype) -> None:
    """One after the other, as the updates and scorings of a process come."""
    heads = linear(300, bias=True).to(dtype), linear(19, bias=True).to(dtype)
    for head, temperature, entropy, chunk, transform in (
        (heads[0], 0.7, "detached", TOKENS // 2, NO_TRANSFORM),
        (heads[1], 1.0, "none", TOKENS, NO_TRANSFORM),
        (heads[1], 1.0, "detached", TOKENS // 3, LogitTransform(0.3, 4.0)),
        (heads[0], 1.3, "differentiable", TOKENS // 2, LogitTransform(1.3, 4.0)),
        (heads[1], 1.0, "detached", TOKENS // 2, NO_TRANSFORM),
    ):
        score = HeadScore(temperature, entropy, chunk, transform=transform)
        expected, found = (
            ours(head, dataclasses.replace(score, compiled=compiled)) for compiled in (False, True)
        )
        apart = errors(found, {name: value.double() for name, value in expected.items()})
        # A gradient on the other side of a rounding boundary is one bf16 step away.
        assert max(apart.values()) < (2e-6 if dtype == torch.float32 else 2e-3), score
