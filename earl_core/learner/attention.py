"""Variable-length attention: many samples in one flat sequence, no T x T mask.

transformers builds a dense T x T mask when `position_ids` restart inside a sequence (1.1 GB at
32K tokens). `earl_varlen` is registered with transformers' AttentionInterface instead: the model
forward gets the keyword `sample_boundaries`, every layer hands it to the attention function, and
attention runs causally inside each sample. Samples of similar length share one batched call;
right padding needs no mask there, because causal attention never looks to the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from earl_core.learner import attention_cuda

ATTENTION_NAME = "earl_varlen"

# Up to this padded length, scores as plain matrix products in float32 beat torch's fused CPU
# kernel by 1.2 (fp32) to 4 times (bf16); they hold T * heads * 128 numbers, linear in T.
_SHORT = 128
# Longer samples amortise a call of their own, so padding them together only costs.
_NO_PADDING_FROM = 512
# Query rows of one call when a sliding window cuts the keys.
_WINDOW_BLOCK = 512


@dataclass(frozen=True)
class Bucket:
    """Samples attended in one batched call.

    count, length: the call's batch size and padded length. start: first token of the bucket in
    the pack. gather: int64 [count * length], the pack position of each padded position, or None
    when the bucket's tokens lie in the pack in order and without padding.
    """

    count: int
    length: int
    start: int
    gather: torch.Tensor | None


@dataclass(frozen=True)
class SampleBoundaries:
    """Where the samples of a pack begin and end, made once per pack on the host.

    lengths: tokens of each sample, in pack order. cu_seqlens: int32 [samples + 1], on the device.
    scatter: int64 [T], the position of each pack token among the buckets' concatenated padded
    positions, or None for the identity. padded_tokens: positions that attention computes.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    longest: int
    buckets: tuple[Bucket, ...]
    scatter: torch.Tensor | None
    padded_tokens: int

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> SampleBoundaries:
        """Plan the buckets for samples of these lengths (all positive)."""
        sizes = np.asarray(lengths, dtype=np.int64)
        if sizes.ndim != 1 or sizes.size == 0 or sizes.min() < 1:
            raise ValueError(f"A pack needs at least one sample of at least one token: {lengths}.")
        starts = np.concatenate([[0], np.cumsum(sizes)])
        order = np.argsort(-sizes, kind="stable")
        scatter = np.empty(int(starts[-1]), dtype=np.int64)
        buckets: list[Bucket] = []
        offset = 0
        for members in _group_similar(sizes, order):
            length = int(sizes[members[0]])
            positions = starts[members][:, None] + np.arange(length)
            real = np.arange(length) < sizes[members][:, None]
            padded = offset + np.arange(members.size * length).reshape(positions.shape)
            scatter[positions[real]] = padded[real]
            # A padding position repeats its sample's first token: any valid index will do, since
            # nothing real attends to it and its own output is dropped.
            gather = np.where(real, positions, starts[members][:, None]).reshape(-1)
            start = int(gather[0])
            in_order = np.array_equal(gather, np.arange(start, start + gather.size))
            buckets.append(
                Bucket(
                    count=int(members.size),
                    length=length,
                    start=start,
                    gather=None if in_order else torch.from_numpy(gather).to(device),
                )
            )
            offset += gather.size
        identity = np.array_equal(scatter, np.arange(offset))
        return cls(
            lengths=tuple(int(size) for size in sizes),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)).to(device),
            longest=int(sizes.max()),
            buckets=tuple(buckets),
            scatter=None if identity else torch.from_numpy(scatter).to(device),
            padded_tokens=offset,
        )


def _group_similar(sizes: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
    """Cut samples, longest first, into groups that waste at most a quarter on padding."""
    groups: list[np.ndarray] = []
    first = 0
    for index in range(1, order.size + 1):
        longest = int(sizes[order[first]])
        if index < order.size:
            size = int(sizes[order[index]])
            similar = 4 * size >= 3 * longest and longest < _NO_PADDING_FROM
            if size == longest or similar:
                continue
        groups.append(order[first:index])
        first = index
    return groups


def register_attention() -> str:
    """Make `earl_varlen` known to transformers; returns the name. Idempotent.

    No mask function is registered with it: transformers then passes no mask at all and also
    skips its search for packed sequences, which would synchronise with the device.
    """
    AttentionInterface.register(ATTENTION_NAME, varlen_attention)
    return ATTENTION_NAME


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sample_boundaries: SampleBoundaries | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sample of a pack; transformers' attention signature.

    query [1, heads, T, dim]; key, value [1, kv_heads, T, dim]; returns ([1, T, heads, dim], None).
    Dropout is never applied: log-probs must be those of the policy that played. Raises ValueError
    when the boundaries are missing or the model's attention needs what is not supported here.
    """
    _check_supported(module, attention_mask, sample_boundaries, unsupported)
    assert sample_boundaries is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and sliding_window >= sample_boundaries.longest:
        sliding_window = None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if attention_cuda.usable(q, k, v):
        return attention_cuda.attend(q, k, v, sample_boundaries, scale, sliding_window)[None], None
    outputs = []
    for bucket in sample_boundaries.buckets:
        attended = _attend_bucket(
            _take(q, bucket), _take(k, bucket), _take(v, bucket), scale, sliding_window
        )
        outputs.append(attended.transpose(1, 2).reshape(-1, *attended.shape[1::2]))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if sample_boundaries.scatter is not None:
        packed = packed.index_select(0, sample_boundaries.scatter)
    return packed[None], None


def _check_supported(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    boundaries: SampleBoundaries | None,
    unsupported: dict[str, Any],
) -> None:
    if boundaries is None:
        raise ValueError(
            f"{type(module).__name__} was called without `sample_boundaries`: either the model's "
            "forward does not pass keyword arguments on to its attention, or it was called "
            "directly; call it through earl_core.learner.model."
        )
    if attention_mask is not None:
        raise ValueError("Packed samples take no attention_mask: do not pass one to the model.")
    for name in ("softcap", "s_aux", "position_bias"):
        if unsupported.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} uses `{name}` in its attention, which packed training "
                "does not support: choose a model without it."
            )
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal: choose a causal language model.")


def _take(states: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[T, heads, dim] -> the bucket's [count, heads, length, dim]."""
    if bucket.gather is None:
        chosen = states.narrow(0, bucket.start, bucket.count * bucket.length)
    else:
        chosen = states.index_select(0, bucket.gather)
    return chosen.reshape(bucket.count, bucket.length, *states.shape[1:]).transpose(1, 2)


def _attend_bucket(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention of [count, heads, length, dim]; key and value may have fewer heads."""
    if query.device.type == "cpu" and query.shape[2] <= _SHORT:
        return _short_attention(query, key, value, scale, window)
    # Rotary embeddings leave query and key in float32 under autocast; the fused kernels want one
    # dtype, and the value's is the one that autocast chose.
    query, key = query.to(value.dtype), key.to(value.dtype)
    grouped = query.shape[1] != key.shape[1]
    if window is not None and window < query.shape[2]:
        return _window_attention(query, key, value, scale, window)
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )


def _short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    count, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    # The query heads that share a key head are stacked along the rows, so keys are not repeated.
    with torch.autocast(query.device.type, enabled=False):
        q = query.float().reshape(count * kv_heads, heads // kv_heads * length, dim)
        k = key.float().reshape(count * kv_heads, length, dim)
        v = value.float().reshape(count * kv_heads, length, dim)
        mask = _causal_mask(length, length, 0, window, q.device).repeat(heads // kv_heads, 1)
        scores = torch.baddbmm(mask[None], q, k.transpose(1, 2), alpha=scale)
        attended = torch.bmm(torch.softmax(scores, dim=-1), v)
    return attended.view(count, heads, length, dim).to(value.dtype)


def _window_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Sliding window in blocks of queries, each with only the keys it can see."""
    blocks = []
    grouped = query.shape[1] != key.shape[1]
    for start in range(0, query.shape[2], _WINDOW_BLOCK):
        stop = min(start + _WINDOW_BLOCK, query.shape[2])
        first = max(0, start - window + 1)
        mask = _causal_mask(stop - start, stop - first, start - first, window, query.device)
        blocks.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, first:stop],
                value[:, :, first:stop],
                attn_mask=mask.to(query.dtype),
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(blocks, dim=2)


def _causal_mask(
    rows: int, columns: int, offset: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Additive float32 [rows, columns]; row r stands at column r + offset."""
    distance = (
        torch.arange(rows, device=device)[:, None]
        + offset
        - torch.arange(columns, device=device)[None, :]
    )
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(rows, columns, device=device).masked_fill_(hidden, float("-inf"))
