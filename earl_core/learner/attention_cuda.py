"""The CUDA side of variable-length attention: torch's own flash varlen kernel."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from earl_core.learner.attention import SampleBoundaries


def usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel takes these tensors: CUDA, half precision, head size up to 256."""
    return (
        query.device.type == "cuda"
        and value.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and find_spec("torch.nn.attention.varlen") is not None
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: SampleBoundaries,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention over [T, heads, dim] without a host synchronisation.

    A run that continues a shared prefix has more keys than queries; the kernel aligns the causal
    mask to the last ones (flash attention, since version 2.1).
    """
    from torch.nn.attention.varlen import varlen_attn

    cu_keys, longest = boundaries.cu_seqlens, boundaries.longest_run
    if boundaries.keys is not None and boundaries.cu_keys is not None:
        key, value = key.index_select(0, boundaries.keys), value.index_select(0, boundaries.keys)
        cu_keys, longest = boundaries.cu_keys, boundaries.longest
    attended = varlen_attn(
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        boundaries.cu_seqlens,
        cu_keys,
        boundaries.longest_run,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, torch.Tensor)
    return attended
