"""Which kernels attend on a GPU, of facts that are written here, and what cuDNN's call computes."""

from __future__ import annotations

import pytest
import torch

from earl_core.learner.attention import attention_plan, varlen_cuda, varlen_dense
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.attention.varlen_cuda import Found, Kernels, choose
from tests.learner.test_context_parallel import reference_varlen

NEW, OLD = 91501, 91002


@pytest.mark.parametrize(
    ("capability", "cudnn", "flash_3", "usual", "deterministic"),
    [
        ((7, 5), NEW, True, Kernels(None), Kernels(None)),  # T4
        ((8, 0), NEW, True, Kernels(2), Kernels(2)),  # A100
        ((8, 9), NEW, False, Kernels(2), Kernels(2)),  # L40S
        ((9, 0), NEW, False, Kernels(2, cudnn=True), Kernels(2)),  # H100, H200
        ((9, 0), NEW, True, Kernels(3), Kernels(2)),
        ((9, 0), OLD, False, Kernels(2), Kernels(2)),
        ((9, 0), 0, False, Kernels(2), Kernels(2)),
        ((10, 0), NEW, True, Kernels(2, cudnn=True), Kernels(2)),  # B200
        ((12, 0), NEW, True, Kernels(2), Kernels(2)),  # RTX 5090
    ],
)
def test_the_choice(
    capability: tuple[int, int], cudnn: int, flash_3: bool, usual: Kernels, deterministic: Kernels
) -> None:
    found = Found(capability, cudnn, flash_3, varlen=True)
    assert choose(found, deterministic=False) == usual
    assert choose(found, deterministic=True) == deterministic
    without = Found(capability, cudnn, flash_3, varlen=False)
    assert choose(without, deterministic=False) == Kernels(None)


@pytest.mark.parametrize(
    ("lengths", "alike"),
    [([7], 1), ([6, 6, 6], 3), ([600, 600], 2), ([5, 5, 4], 0), ([4, 5, 5], 0), ([600, 599], 0)],
)
def test_which_packs_are_samples_of_one_length(lengths: list[int], alike: int) -> None:
    assert SampleBoundaries.from_lengths(lengths).alike == alike


def states_of(total: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    states = [torch.randn(1, heads, total, 16) for heads in (4, 2, 2)]
    return [each.requires_grad_() for each in states]


@pytest.mark.parametrize("lengths", [[64], [71], [37, 37, 37], [40, 30]])
def test_long_samples_of_one_length_go_to_the_fused_call(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients, against plain products; 71 and 37 are rounded up, and back."""
    called: list[int] = []

    def fused(*given: torch.Tensor, **options: object) -> torch.Tensor:
        called.append(given[0].shape[2])
        return fused_attention(*given, **options)

    fused_attention = torch.nn.functional.scaled_dot_product_attention
    with monkeypatch.context() as patch:
        patch.setattr(attention_plan, "kernel_calls_wanted", lambda device: True)
        patch.setattr(varlen_cuda, "usable", lambda *states: True)
        patch.setattr(varlen_cuda, "kernels_of", lambda device: Kernels(2, cudnn=True))
        patch.setattr(varlen_cuda, "_LONG", 32)
        patch.setattr("torch.nn.attention.varlen.varlen_attn", reference_varlen)
        patch.setattr(varlen_cuda.F, "scaled_dot_product_attention", fused)
        boundaries = SampleBoundaries.from_lengths(lengths)
        ours = states_of(sum(lengths))
        found, _ = varlen_attention(torch.nn.Identity(), *ours, None, sample_boundaries=boundaries)
        assert called == {64: [64], 71: [72], 37: [40], 40: []}[lengths[0]]
        varlen_attention(
            torch.nn.Identity(), *ours, None, sliding_window=20, sample_boundaries=boundaries
        )
        assert len(called) <= 1, "it takes no windows"
    theirs = states_of(sum(lengths))
    query, key, value = (
        each[0].transpose(0, 1).double().repeat_interleave(4 // each.shape[1], dim=1)
        for each in theirs
    )
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    expected = reference_varlen(
        query, key, value, edges, edges, max(lengths), max(lengths),
        scale=0.25, window_size=(-1, 0), enable_gqa=False,
    )  # fmt: skip
    direction = torch.randn(expected.shape)
    (found[0] * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(found[0].double(), expected, atol=2e-6, rtol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert float(other.grad.abs().max()) > 0.1
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "window"), [(700, None), (700, 40), (300, None)])
def test_a_gpu_without_a_varlen_kernel_is_asked_for_no_shared_key_heads(
    rows: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 and masks go to a kernel that takes none; without it all scores exist at once."""
    asked: list[tuple[int, int, bool]] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object):  # type: ignore[no-untyped-def]
        asked.append((key.shape[1], value.shape[1], bool(options["enable_gqa"])))
        return torch.empty_like(query)

    monkeypatch.setattr(varlen_dense.F, "scaled_dot_product_attention", attend)
    query = torch.empty(1, 8, rows, 64, device="meta")
    key, value = (torch.empty(1, 2, 700, 64, device="meta") for _ in range(2))
    varlen_dense.attend_bucket(query, key, value, 0.125, window)
    assert set(asked) == {(8, 8, False)}
