"""Attention of one bucket of runs, on any device: what is used where no varlen kernel is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from earl_core.learner.attention.sinks import sink_attention
from earl_core.tensors.plain_attention import ScoreChange, attend_plainly

# Up to this padded length, scores as plain matrix products in float32 beat torch's fused CPU
# kernel by 1.2 (fp32) to 4 times (bf16); they hold T * heads * 128 numbers, linear in T.
_SHORT = 128
# The same for runs that continue a shared prefix, by the number of keys.
_SHORT_AFTER_PREFIX = 256
# Query rows of one call when a sliding window or a shared prefix needs a mask.
_QUERY_BLOCK = 512
# Numbers (64 MiB in float32) of the scores that exist at a time where plain products make them.
_SCORES_HELD = 2**24
# Numbers (64 MiB in float32) of the masks of a call's blocks that may wait for the backward pass;
# with more, each block and its mask are computed again there.
_MASKS_KEPT = 2**24


def batched(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The rows of a bucket's runs [count * length, heads, dim] -> [count, heads, length, dim]."""
    return rows.reshape(count, -1, *rows.shape[1:]).transpose(1, 2)


def attend_bucket(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    change: ScoreChange | None = None,
) -> torch.Tensor:
    """Causal attention of [count, heads, length, dim] to keys and values [count, kv_heads, keys,
    dim], whose last `length` belong to the queries and whose others all come before them. Values
    may have a size of their own. change: of the scores, which plain products compute;
    sinks of longer runs on a CPU the fused kernel.
    """
    rows, columns = query.shape[2], key.shape[2]
    short = _SHORT if rows == columns else _SHORT_AFTER_PREFIX
    is_short, on_cpu = columns <= short, query.device.type == "cpu"
    if change is not None and (change.cap or is_short or not on_cpu):
        return _changed_attention(query, key, value, scale, window, change)
    if on_cpu and is_short:
        return _short_attention(query, key, value, scale, window)
    # Some families leave query and key in float32 after their rotary embeddings; the fused kernels
    # want one dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    width = value.shape[3]
    if on_cpu and query.shape[3] != width:
        # Latent attention (MLA). The fused kernel wants one width; without it torch computes all
        # scores at once, T * T a head.
        most = max(query.shape[3], width)
        query, key, value = (F.pad(x, (0, most - x.shape[3])) for x in (query, key, value))
    sinks = None if change is None else change.sinks
    return _fused_attention(query, key, value, scale, window, sinks)[..., :width]


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, columns = query.shape[2], key.shape[2]
    if rows != columns or (window is not None and window < rows):
        return _blocked_attention(query, key, value, scale, window, sinks)
    return _fused(query, key, value, sinks, is_causal=True, scale=scale)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """torch's kernels that hold no scores. On a GPU, up to torch 2.13, the one that takes float32
    or a mask takes no fewer key heads than query heads."""
    if sinks is not None:
        return sink_attention(query, key, value, sinks, **options)
    sharing = query.shape[1] // key.shape[1]
    if query.device.type != "cpu" and sharing > 1:
        key, value = (each.repeat_interleave(sharing, dim=1) for each in (key, value))
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=gqa, **options)


def _changed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    change: ScoreChange,
) -> torch.Tensor:
    """Blocks of queries. Where there are several, the scores of one exist at a time, and again in
    the backward pass."""
    count, heads, rows = query.shape[:3]
    prefix = key.shape[2] - rows
    step = min(max(1, _SCORES_HELD // (count * heads * key.shape[2])), _QUERY_BLOCK)

    def attend(start: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        offset = prefix + start - (key_start(start))
        mask = _causal_mask(q.shape[2], k.shape[2], offset, window, q.device)
        return attend_plainly(q, k, v, mask, scale, change)

    def key_start(start: int) -> int:
        return 0 if window is None else max(0, prefix + start - window + 1)

    blocks = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        seen = slice(key_start(start), prefix + stop)
        block = (start, query[:, :, start:stop], key[:, :, seen], value[:, :, seen])
        if step < rows and torch.is_grad_enabled():
            kept: Any = checkpoint(attend, *block, use_reentrant=False, preserve_rng_state=False)
            blocks.append(kept)
        else:
            blocks.append(attend(*block))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    count, heads, rows, dim = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    # The query heads that share a key head are stacked along the rows, so keys are not repeated.
    q = query.float().reshape(count * kv_heads, heads // kv_heads * rows, dim)
    k = key.float().reshape(count * kv_heads, columns, dim)
    v = value.float().reshape(count * kv_heads, columns, value.shape[3])
    mask = _causal_mask(rows, columns, columns - rows, window, q.device)
    mask = mask.repeat(heads // kv_heads, 1)
    scores = torch.baddbmm(mask[None], q, k.transpose(1, 2), alpha=scale)
    attended = torch.bmm(torch.softmax(scores, dim=-1), v)
    return attended.view(count, heads, rows, value.shape[3]).to(value.dtype)


def _blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Blocks of queries, each with only the keys it can see, so that masks stay small."""
    blocks = []
    rows = query.shape[2]
    prefix = key.shape[2] - rows
    columns = key.shape[2] if window is None else min(key.shape[2], window + _QUERY_BLOCK)
    many = rows * columns > _MASKS_KEPT and torch.is_grad_enabled()
    for start in range(0, rows, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, rows)
        first = 0 if window is None else max(0, prefix + start - window + 1)
        seen = slice(first, prefix + stop)
        block = (query[:, :, start:stop], key[:, :, seen], value[:, :, seen])
        offset = prefix + start - first
        if many:
            blocks.append(
                checkpoint(
                    _masked_attention,
                    *block,
                    offset,
                    scale,
                    window,
                    sinks,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        else:
            blocks.append(_masked_attention(*block, offset, scale, window, sinks))
    return torch.cat(blocks, dim=2)


def _masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offset: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Row r stands at column r + offset."""
    mask = _causal_mask(query.shape[2], key.shape[2], offset, window, query.device)
    return _fused(query, key, value, sinks, attn_mask=mask.to(query.dtype), scale=scale)


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
