"""Selective activation checkpointing: which operators' results a layer keeps for its backward pass.

Results that are dear to compute are kept: matrix products, attention, and the sums over tensor
ranks that follow a product. Norms, activations and everything else that goes element by element is
computed again, and so are the keys and values that context ranks gather. After torchtitan's
`activation_checkpoint.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# Scores of short samples on a CPU (`baddbmm`) are large and not among them.
_KEPT = frozenset(
    {
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten._grouped_mm",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "torch_attn._varlen_attn",
        "_c10d_functional.all_reduce",
        "_c10d_functional.reduce_scatter_tensor",
    }
)


def selective_contexts() -> tuple[Any, Any]:
    """The contexts of a layer's forward pass and of computing it again, as `checkpoint` takes them
    (`context_fn`).
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    kept = _is_kept(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_kept(operator: Any) -> bool:
    # By name, because a kernel may be registered when it is first used.
    return str(operator).removesuffix(".default") in _KEPT
