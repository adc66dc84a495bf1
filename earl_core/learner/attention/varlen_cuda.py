"""The CUDA side of variable-length attention: the kernels that `kernels` chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from earl_core.learner.attention.kernels import kernels_of, use_flash, varlen_options
from earl_core.learner.shared_rows import deal

if TYPE_CHECKING:
    from earl_core.learner.attention.attention_plan import KernelCall, SampleBoundaries

# Tokens of a sample from which cuDNN's lead outweighs its planning.
_LONG = 4096
_CUDNN_HEAD_SIZE = 128
# torch itself falls back on the second where it finds that the first will not do.
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether a varlen kernel takes these tensors: CUDA, half precision, a head size up to 256
    that is a multiple of 8."""
    return (
        query.device.type == "cuda"
        and value.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and kernels_of(query.device).flash is not None
    )


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
    kernels, alike = kernels_of(query.device), boundaries.alike
    if (
        kernels.cudnn
        and window is None
        and alike
        and boundaries.longest >= _LONG
        and query.shape[-1] <= _CUDNN_HEAD_SIZE
    ):
        return attend_alike(query, key, value, alike, scale)
    use_flash(kernels)
    taken = [call.keys for call in boundaries.calls]
    queries = deal(query, [call.queries for call in boundaries.calls])
    keys, values = deal(key, taken), deal(value, taken)
    parts = [
        _call(*states, scale, window)
        for states in zip(boundaries.calls, queries, keys, values, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_alike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int, scale: float
) -> torch.Tensor:
    """Causal attention inside each of `count` samples of one length, [count * length, heads, dim].

    cuDNN plans each new shape, for about half a second each way: lengths are rounded up to eight
    between a power of two and the next, at most 41 up to 128 K tokens. The padding is on the
    right, where nothing that is kept attends to it.
    """
    length = query.shape[0] // count
    step = max(1, 2 ** (length.bit_length() - 4))
    more = -length % step

    def batched(states: torch.Tensor) -> torch.Tensor:
        """View the states as they lie, which is how cuDNN wants them: [count, heads, length,
        dim]."""
        batch = states.reshape(count, length, *states.shape[1:])
        return (F.pad(batch, (0, 0, 0, 0, 0, more)) if more else batch).transpose(1, 2)

    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        attended = F.scaled_dot_product_attention(
            batched(query),
            batched(key),
            batched(value),
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return attended.transpose(1, 2)[:, :length].reshape(query.shape)


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
    if "enable_gqa" in varlen_options():
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
