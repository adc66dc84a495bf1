"""Bytes that a token leaves in a decoder layer for the backward pass, on one device.

With an attention kernel that stores no score matrix. Where an adapter is trained alone, a frozen
matrix needs its inputs only for the pair beside it, and a frozen norm those of its weight not at
all; each pair keeps its product of `rank` numbers besides.
"""

from __future__ import annotations

from earl_core.deployment.layer_shapes import StateShape
from earl_core.deployment.shapes import ModelShape

CHUNK = 64
"""Tokens that a gated delta rule takes together."""


def standard_activation_bytes(shape: ModelShape, tokens: int) -> float:
    """Activations of a whole model in 16 bit with stored attention scores and no parallelism:
    s·h·L·(34 + 5·a·s/h), for one sequence of `tokens` (Korthikanti et al. 2022, equation 1)."""
    scores = 5 * shape.attention_heads * tokens / shape.hidden_size
    return float(tokens * shape.hidden_size * shape.layers) * (34 + scores)


def layer_activation_bytes(shape: ModelShape, tensor: int = 1, mixed: bool = True) -> float:
    """Count the bytes that one token leaves in the largest layer for the backward pass, on one
    device: of two norms, of what mixes tokens, and of the feed-forward part. Tensor parallel ranks
    share all but what their matrices read."""
    mixing = attention_bytes(shape, mixed) if shape.attention_layers else 0.0
    if shape.states is not None:
        mixing = max(mixing, state_layer_bytes(shape.states, mixed))
    products = (
        routed_bytes(shape, mixed)
        if shape.routed_layers
        else feed_forward_bytes(shape, tensor, mixed)
    )
    beside = norm_bytes(shape, tensor, mixed) + pair_bytes(shape, mixed)
    return mixing / tensor + products + beside


def mean_activation_bytes(shape: ModelShape, tensor: int = 1, mixed: bool = True) -> float:
    """The same of the mean layer."""
    attention, routed = shape.attention_share, shape.routed_layers / shape.layers
    mixing = attention * attention_bytes(shape, mixed)
    if shape.states is not None:
        mixing += (1 - attention) * state_layer_bytes(shape.states, mixed)
    products = (1 - routed) * feed_forward_bytes(shape, tensor, mixed)
    if routed:
        products += routed * routed_bytes(shape, mixed)
    beside = norm_bytes(shape, tensor, mixed) + pair_bytes(shape, mixed)
    return mixing / tensor + products + beside


def attention_bytes(shape: ModelShape, mixed: bool) -> float:
    """Count the bytes that a token leaves in the attention of a layer: query, key, value, output
    and its log-sum; of norms of queries and keys input in float32 and normalised input; of a gate
    its sigmoid and the product; of latents what their norms keep and give."""
    value = 2 if mixed else 4
    kept = shape.query_size + 2 * shape.key_value_size + shape.output_size
    if shape.gated_attention:
        kept += 2 * shape.output_size
    normed = shape.query_size + shape.key_value_size if shape.query_key_norms else 0
    if shape.latent is not None:
        normed += shape.latent.query_rank + shape.latent.key_value_rank
        kept += shape.latent.query_rank + shape.latent.key_value_rank
    return kept * value + 4 * shape.attention_heads + normed * (4 + value)


def state_layer_bytes(states: StateShape, mixed: bool) -> float:
    """Count the bytes that a token leaves in the mixing of a layer with a state, as transformers'
    torch form computes it: before the convolution and after it, the rule's numbers, and in the
    norm of its gated output three in float32 and three others. The kernels of
    flash-linear-attention keep less."""
    value = 2 if mixed else 4
    outside = value * (2 * states.mixed_size + 3 * states.value_size) + 12 * states.value_size
    return outside + rule_bytes(states)


def rule_bytes(states: StateShape) -> float:
    """Count the bytes of a token in a gated delta rule by chunks, all in float32: eight as wide as
    the keys of all value heads and three as wide as their values, five rows of products between
    the tokens of a chunk, and its share of the chunk's state."""
    keys = states.value_heads * states.key_dim
    numbers = 8 * keys + 3 * states.value_size + 5 * CHUNK * states.value_heads
    return 4.0 * (numbers + states.numbers / CHUNK)


def feed_forward_bytes(shape: ModelShape, tensor: int, mixed: bool) -> float:
    """Count the bytes that a token leaves in a dense feed-forward part: the input and the
    output of its activation, and with a gate the other factor of the product and the product."""
    kept = (4 if shape.gated_mlp else 2) - (not _read(shape, "down_proj"))
    return kept * shape.feed_forward * (2 if mixed else 4) / tensor


def routed_bytes(shape: ModelShape, mixed: bool) -> float:
    """Count the bytes that a token leaves in a routed feed-forward part: for each of its experts
    the input, which is sorted by expert, four products as in a dense part, and the output, which is
    weighted; the router's probabilities in float32; of shared experts the same products, and before
    a gate their output."""
    kept = shape.experts_per_token * 2 * shape.hidden_size + 4 * shape.routed_width
    if shape.shared_expert_gate:
        kept += shape.hidden_size
    return kept * (2 if mixed else 4) + 4 * shape.experts


def engine_width(shape: ModelShape, times: int) -> float:
    """Count the numbers of a token in the feed-forward part of an engine's pass that keeps nothing:
    so many times the width; of experts rows that are sorted, put out, weighted and sorted back."""
    dense = times * shape.feed_forward if shape.routed_layers < shape.layers else 0
    if not shape.routed_layers:
        return dense
    rows = shape.experts_per_token * shape.hidden_size
    weighted = 2 * rows if shape.float32_gates else rows
    routed = max(2 * (rows + weighted), rows + 3 * shape.experts_per_token * shape.expert_width)
    return max(dense, routed + times * shape.shared_expert_size)


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


def selective_layer_bytes(shape: ModelShape, tensor: int, mixed: bool, degree: int = 1) -> float:
    """Bytes that a token leaves in the mean layer under selective checkpointing, on one device.

    The layer's input; the products: query, key, value, output, gate, up and down; attention's
    output and its log-sum; of a layer with a state its products; of experts also the router's, and
    each one's output, where they are divided over `degree` ranks its rows as they arrived, too, on
    either way. Tensor parallel ranks share all but the results of output and down before
    they are added up over the ranks. The product of a pair's B is computed again.
    """
    value, routed = 2 if mixed else 4, shape.routed_layers / shape.layers
    split = (3 if tensor > 1 else 1) * shape.hidden_size + _mixed_sizes(shape)
    split += (2 if shape.gated_mlp else 1) * shape.mean_width
    rows = (3 if degree > 1 else 1) * shape.experts_per_token
    split += routed * (rows * shape.hidden_size + shape.experts)
    split_bytes = (value * split + 4 * shape.attention_share * shape.attention_heads) / tensor
    return 2 * value * shape.hidden_size + split_bytes + pair_bytes(shape, mixed)


def compiled_layer_bytes(shape: ModelShape, tensor: int, mixed: bool) -> float:
    """Count the bytes that one token leaves in the mean compiled layer, on one device: the states
    that its parts, before and after attention, hand to each other or multiply by weights.

    The states before and after attention, and normalised, which each tensor rank's matrices read
    whole; query, key, value, attention's output and its log-sum; gate, up, and what down reads; of
    experts also their inputs, sorted, and their outputs.
    """
    value, routed = 2 if mixed else 4, shape.routed_layers / shape.layers
    split = 2 * shape.hidden_size + _mixed_sizes(shape)
    split += (3 if shape.gated_mlp else 2) * shape.mean_width
    split += routed * 2 * shape.experts_per_token * shape.hidden_size
    split_bytes = (value * split + 4 * shape.attention_share * shape.attention_heads) / tensor
    return 2 * value * shape.hidden_size + split_bytes + pair_bytes(shape, mixed)


def _mixed_sizes(shape: ModelShape) -> float:
    """Add up the widths of what goes into attention and comes out of it, or into the rule of a
    state; the mean over layers."""
    queries = (2 if shape.gated_attention else 1) * shape.query_size
    sizes = shape.attention_share * (queries + 2 * shape.key_value_size + shape.output_size)
    if shape.states is not None:
        inputs = shape.states.mixed_size + 2 * shape.states.value_size
        sizes += (1 - shape.attention_share) * inputs
    return sizes
