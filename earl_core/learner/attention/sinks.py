"""Attention with sinks by torch's fused CPU kernel.

A sink is one more key, of score s and value zero: with the sum of exponentials Z and the kernel's
output o, the output is o * Z / (Z + exp(s)). The kernel's backward pass computes the weights from
log Z and the gradient of the scores from the output, and so is that of the attention with a sink
when it is given log(Z + exp(s)) and that output. The gradient of s is the sink's weight,
exp(s) / (Z + exp(s)), times minus (gradient of the output) . (output), as of any key of value zero.
"""

from __future__ import annotations

from typing import Any

import torch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    *,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """query [count, heads, rows, dim]; key, value [count, kv_heads, columns, dim]; sinks: scores,
    [heads]; attn_mask: additive, [rows, columns]. Like the query. On a CPU only."""
    found = _SinkAttention.apply(query, key, value, sinks, attn_mask, is_causal, scale)  # type: ignore[no-untyped-call]
    assert isinstance(found, torch.Tensor)
    return found


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        found, log_sum = _forward(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        whole = torch.logaddexp(log_sum, sinks.float()[None, :, None])
        attended = (found * (log_sum - whole).exp()[..., None]).to(found.dtype)
        ctx.save_for_backward(query, key, value, sinks, mask, attended, whole)
        ctx.options = causal, scale
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, mask, attended, whole = ctx.saved_tensors
        causal, scale = ctx.options
        to_attended = gradients[0]
        to_states = _backward(
            to_attended, query, key, value, attended, whole, 0.0, causal,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        weights = (sinks.float()[None, :, None] - whole).exp()
        to_sinks = -(weights * (to_attended.float() * attended.float()).sum(-1)).sum((0, 2))
        return *to_states, to_sinks.to(sinks.dtype), None, None, None
