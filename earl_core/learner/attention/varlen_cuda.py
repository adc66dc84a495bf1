"""The CUDA side of variable-length attention: torch's own flash varlen kernel."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from earl_core.learner.rows import deal

if TYPE_CHECKING:
    from earl_core.learner.attention.attention_plan import KernelCall, SampleBoundaries


def usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel takes these tensors: CUDA, half precision, head size up to 256."""
    return (
        query.device.type == "cuda"
        and value.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and "window_size" in _options()
    )


@cache
def _options() -> frozenset[str]:
    """The parameters of torch's varlen kernel; none where torch has no such kernel."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: SampleBoundaries,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of [T, heads, dim] to [keys, kv_heads, dim] without a host synchronisation.

    A run that continues a shared prefix has more keys than queries; the kernel aligns the causal
    mask to the last ones (flash attention, since version 2.1).
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    taken = [call.keys for call in boundaries.calls]
    queries = deal(query, [call.queries for call in boundaries.calls])
    keys, values = deal(key, taken), deal(value, taken)
    parts = [
        _call(*states, scale, window)
        for states in zip(boundaries.calls, queries, keys, values, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _call(
    call: KernelCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if "enable_gqa" in _options():
        # Before torch 2.12 the kernel takes fewer key heads without being told.
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    attended = varlen_attn(
        query,
        key,
        value,
        call.cu_seqlens,
        call.cu_keys,
        call.longest,
        call.longest_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(attended, torch.Tensor)
    return attended
