"""Attention over packs: the kernel of the device against plain products in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.config.model import ModelConfig
from earl_core.learner.attention import varlen_cuda
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.attention.varlen_cuda import kernels_of
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.loading import load_policy
from earl_core.learner.model import PackedTensors, logprobs_of_trained
from earl_core.learner.parallel.mesh import create_mesh
from tests.learner.helpers import save_model
from tests.learner.test_prefix_tree import branching

HEADS, PAIRS, WIDTH = 4, 2, 64
LENGTHS = [[7], [5, 5, 5], [200, 3, 129, 1, 31], [600, 64]]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def dense(
    states: Sequence[torch.Tensor], lengths: Sequence[int], window: int | None
) -> torch.Tensor:
    """Query [heads, T, dim], key and value [pairs, T, dim] in float64 -> [T, heads, dim], sample by
    sample."""
    query = states[0]
    key, value = (each.repeat_interleave(HEADS // PAIRS, dim=0) for each in states[1:])
    parts = []
    for q, k, v in zip(
        *(each.split(list(lengths), dim=1) for each in (query, key, value)), strict=True
    ):
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        place = torch.arange(q.shape[1])
        hidden = place[None] > place[:, None]
        if window is not None:
            hidden |= place[None] <= place[:, None] - window
        parts.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts, dim=1).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_attention_and_its_gradients_equal_plain_products(
    device: torch.device, lengths: list[int], kind: torch.dtype, window: int | None
) -> None:
    torch.manual_seed(3)
    total = sum(lengths)
    # What both sides read is rounded alike.
    states = [torch.randn(n, total, WIDTH).to(kind) for n in (HEADS, PAIRS, PAIRS)]
    direction = torch.randn(total, HEADS, WIDTH).to(kind)
    ours = [each.to(device)[None].requires_grad_() for each in states]
    theirs = [each.double().requires_grad_() for each in states]
    if device.type == "cuda" and kind == torch.bfloat16:
        heads_last = [each[0].transpose(0, 1) for each in ours]
        assert varlen_cuda.usable(*heads_last), "this would not test the kernel"
    found, _ = varlen_attention(
        torch.nn.Identity(), *ours, None, sliding_window=window,
        sample_boundaries=SampleBoundaries.from_lengths(lengths, device),
    )  # fmt: skip
    expected = dense(theirs, lengths, window)
    (found[0] * direction.to(device)).sum().backward()
    (expected * direction.double()).sum().backward()
    pairs = [(found[0].detach(), expected.detach())]
    pairs += [(one.grad[0], other.grad) for one, other in zip(ours, theirs, strict=True)]
    for one, other in pairs:
        assert float(other.abs().max()) > 0.1
        error = float((one.cpu().double() - other).norm() / other.norm())
        assert error < TOLERANCE[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["usual", "deterministic"])
@pytest.mark.parametrize("lengths", [[700], [512, 512]], ids=len)
def test_long_samples_of_one_length_have_the_gradients_of_plain_products(
    cuda: torch.device, lengths: list[int], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through cuDNN where that was chosen. Deterministic: the same bits twice, and without it."""
    monkeypatch.setattr(varlen_cuda, "_LONG", 512)
    taken: list[int] = []
    fused = varlen_cuda.attend_alike
    monkeypatch.setattr(
        varlen_cuda, "attend_alike", lambda *given: taken.append(1) or fused(*given)
    )
    torch.manual_seed(3)
    total = sum(lengths)
    states = [torch.randn(n, total, WIDTH).bfloat16() for n in (HEADS, PAIRS, PAIRS)]
    direction = torch.randn(total, HEADS, WIDTH).bfloat16()

    def computed() -> list[torch.Tensor]:
        ours = [each.to(cuda)[None].requires_grad_() for each in states]
        found, _ = varlen_attention(
            torch.nn.Identity(), *ours, None,
            sample_boundaries=SampleBoundaries.from_lengths(lengths, cuda),
        )  # fmt: skip
        (found[0] * direction.to(cuda)).sum().backward()
        return [found[0].detach().cpu(), *(each.grad[0].cpu() for each in ours)]

    torch.use_deterministic_algorithms(deterministic)
    try:
        expects_cudnn = kernels_of(cuda).cudnn
        once, again = computed(), computed()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(taken) == (2 if expects_cudnn else 0)
    if deterministic:
        assert not expects_cudnn
        assert all(map(torch.equal, once, again))
    theirs = [each.double().requires_grad_() for each in states]
    expected = dense(theirs, lengths, None)
    (expected * direction.double()).sum().backward()
    for one, other in zip(once, [expected.detach(), *(e.grad for e in theirs)], strict=True):
        assert float(other.abs().max()) > 0.1
        assert float((one.double() - other).norm() / other.norm()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_shared_prefixes_give_the_gradients_of_single_samples(
    device: torch.device, kind: str, tmp_path: Path
) -> None:
    model = load_policy(ModelConfig(path=str(save_model(kind, tmp_path))), create_mesh()).model
    assert model.device.type == device.type
    samples = branching(1, 6)
    stem = np.random.default_rng(1).integers(1, 40, size=300).astype(np.int32)
    for number in range(3):
        tokens = np.concatenate([stem, samples[number].tokens])
        mask = np.zeros(tokens.size, dtype=np.uint8)
        mask[300::7] = 1
        none = np.zeros(tokens.size, dtype=np.float32)
        samples.append(TrainingSample(tokens, mask, none, sample_id=100 + number))
    rows = list(range(len(samples)))
    stored = sum(len(sample.tokens) for sample in samples)
    assert pack(samples, rows).tokens.size < 0.8 * stored

    def gradients(parts: list[list[int]]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for part in parts:
            packed = PackedTensors.from_microbatch(pack(samples, part), device)
            logprobs, _ = logprobs_of_trained(model, packed, temperature=1.0)
            logprobs.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    together, apart = gradients([rows]), gradients([[row] for row in rows])
    assert together.keys() == apart.keys()
    for name, expected in apart.items():
        assert float(expected.abs().max()) > 0
        error = float((together[name] - expected).norm() / expected.norm())
        assert error < 1e-4, name
