"""Bytes that a token leaves in a decoder layer for the backward pass, on one device.

With an attention kernel that stores no score matrix. Where an adapter is trained alone, a frozen
matrix needs its inputs only for the pair beside it, and a frozen norm those of its weight not at
all; each pair keeps its product of `rank` numbers besides.
"""

from __future__ import annotations

from earl_core.deployment.shapes import ModelShape


def standard_activation_bytes(shape: ModelShape, tokens: int) -> float:
    """Activations of a whole model in 16 bit with stored attention scores and no parallelism:
    s·h·L·(34 + 5·a·s/h), for one sequence of `tokens` (Korthikanti et al. 2022, equation 1)."""
    scores = 5 * shape.attention_heads * tokens / shape.hidden_size
    return float(tokens * shape.hidden_size * shape.layers) * (34 + scores)


def layer_activation_bytes(shape: ModelShape, tensor: int = 1, mixed: bool = True) -> float:
    """Count the bytes that one token leaves in one layer for the backward pass, on one device.

    Two norms; query, key, value, attention output and its log-sum; four feed-forward products (two
    without a gate). Tensor parallel ranks share all but what their matrices read.
    """
    value = 2 if mixed else 4
    attention = 2 * (shape.query_size + shape.key_value_size) * value + 4 * shape.attention_heads
    split = attention / tensor + feed_forward_bytes(shape, tensor, mixed)
    return norm_bytes(shape, tensor, mixed) + split + pair_bytes(shape, mixed)


def feed_forward_bytes(shape: ModelShape, tensor: int, mixed: bool) -> float:
    """Count the bytes that a token leaves in the feed-forward part of a layer: the input and the
    output of its activation, and with a gate the other factor of the product and the product."""
    kept = (4 if shape.gated_mlp else 2) - (not _read(shape, "down_proj"))
    return kept * shape.feed_forward * (2 if mixed else 4) / tensor


def norm_bytes(shape: ModelShape, tensor: int, mixed: bool) -> float:
    """Count the bytes that the two norms of a layer keep of a token: input in float32 and
    normalised input, of which tensor ranks have parts, and the output, which each rank's matrices
    read whole. A frozen norm needs no normalised input; its output is kept if a pair reads it."""
    value = 2 if mixed else 4
    split = 4 + (0 if shape.adapter else value)
    read = _read(shape, "q_proj", "k_proj", "v_proj") + _read(shape, "gate_proj", "up_proj")
    return shape.hidden_size * (2 * split / tensor + read * value)


def pair_bytes(shape: ModelShape, mixed: bool) -> float:
    """Count the bytes that a token leaves in the pairs of a layer: what A gives, which each tensor
    rank has whole."""
    rank = shape.adapter.rank if shape.adapter else 0
    return (2 if mixed else 4) * rank * len(shape.adapted)


def _read(shape: ModelShape, *names: str) -> bool:
    """Tell whether the gradient of a weight or of a pair needs the input of one of the matrices."""
    return shape.adapter is None or any(name in shape.adapted for name in names)


def selective_layer_bytes(shape: ModelShape, tensor: int, mixed: bool) -> float:
    """Bytes that a token leaves in a layer under selective checkpointing, on one device.

    The layer's input; the products: query, key, value, output, gate, up and down; attention's
    output and its log-sum. Tensor parallel ranks share all but the results of output and down
    before they are added up over the ranks. The product of a pair's B is computed again.
    """
    value = 2 if mixed else 4
    split = (3 if tensor > 1 else 1) * shape.hidden_size + 2 * (
        shape.query_size + shape.key_value_size
    )
    split += (2 if shape.gated_mlp else 1) * shape.feed_forward
    split_bytes = (value * split + 4 * shape.attention_heads) / tensor
    return 2 * value * shape.hidden_size + split_bytes + pair_bytes(shape, mixed)


def compiled_layer_bytes(shape: ModelShape, tensor: int, mixed: bool) -> float:
    """Count the bytes that one token leaves in one compiled layer, on one device: the states that
    its parts, before and after attention, hand to each other or multiply by weights.

    The states before and after attention, and normalised, which each tensor rank's matrices read
    whole; query, key, value, attention's output and its log-sum; gate, up, and what down reads.
    """
    value = 2 if mixed else 4
    split = 2 * (shape.hidden_size + shape.query_size + shape.key_value_size)
    split += (3 if shape.gated_mlp else 2) * shape.feed_forward
    split_bytes = (value * split + 4 * shape.attention_heads) / tensor
    return 2 * value * shape.hidden_size + split_bytes + pair_bytes(shape, mixed)
