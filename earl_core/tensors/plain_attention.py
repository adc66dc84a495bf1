"""Attention in plain products, for what fused kernels do not compute: soft caps and sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class ScoreChange:
    """What a model does with its attention's scores.

    cap: scores s become cap * tanh(s / cap) (Gemma 2, arXiv 2408.00118, equation 1); None: nothing.
    sinks: [heads], the score of one more key for each head, whose value is zero (gpt-oss); None:
    there is none.
    """

    cap: float | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, cap: float | None, sinks: torch.Tensor | None) -> ScoreChange | None:
        """None where nothing is changed."""
        return cls(cap, sinks) if cap or sinks is not None else None


def attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    change: ScoreChange,
) -> torch.Tensor:
    """query [count, heads, rows, dim]; key, value [count, kv_heads, columns, dim]; mask: additive,
    [rows, columns] or [count, 1, 1, rows, columns]. Returns [count, heads, rows, value's dim] in
    the value's dtype. Computed in float32; all scores exist at a time.
    """
    count, heads, rows, _ = query.shape
    kv_heads, columns = key.shape[1:3]
    # The query heads that share a key head are stacked along the rows, so keys are not repeated.
    q = query.float().reshape(count * kv_heads, -1, query.shape[3])
    k, v = (each.float().reshape(count * kv_heads, columns, -1) for each in (key, value))
    scores = (q @ k.transpose(1, 2)).view(count, kv_heads, -1, rows, columns) * scale
    if change.cap:
        scores = torch.tanh(scores / change.cap) * change.cap
    scores = scores + mask
    if change.sinks is not None:
        sinks = change.sinks.float().view(1, kv_heads, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :columns]
    attended = weights.reshape(count * kv_heads, -1, columns) @ v
    return attended.view(count, heads, rows, value.shape[3]).to(value.dtype)
