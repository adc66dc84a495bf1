"""The fields of a `ModelShape` by the keys of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from earl_core.deployment.layer_shapes import LatentShape, StateShape

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_GATED_ATTENTION = ("qwen3_next", "qwen3_5", "afmoe")
"""Beginnings of `model_type` whose queries come with a gate of the output, as wide as they."""
_NORMED = ("qwen3", "olmoe", "minimax_m2", "dots1", "exaone_moe", "afmoe")
"""The same of models that normalise queries and keys whatever their configuration says."""
_NARROW_GATES = ("qwen", "olmoe", "gpt_oss")
"""The same of models whose routers give weights of the dtype that computes."""
_SHARED_GATE = ("qwen2_moe", "qwen3_next", "qwen3_5")
"""The same of models whose shared expert has a gate of its own."""
_TIED = (
    *("bloom", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "falcon", "gemma"),
    *("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    *("gpt2", "gpt_bigcode", "gpt_neo", "granite_swa", "jetmoe", "lfm2", "lfm2_moe", "mamba"),
    *("minicpm3", "mpt", "opt", "smollm3", "starcoder2", "vaultgemma", "youtu", "zamba"),
    *("zamba2", "zaya"),
)
"""Model types whose output layer is the embeddings where their configuration says nothing of it."""
_LAYERS = ("full_attention", "sliding_attention", "attention")
"""Types of layers that attend to what came before, the last under the name of older files."""
_LOST_WINDOWS = ("phimoe",)
"""Model types whose layers do not hand on their sliding window."""


def shape_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields. Raises `ValueError` when a number is missing or no model has it."""
    if not isinstance(raw, Mapping):
        raise ValueError("the model's config.json has no keys")
    nested = raw.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else raw
    read = _Numbers(text)
    kind = str(raw.get("model_type", "unknown"))
    heads, hidden = read("num_attention_heads", "n_head"), read("hidden_size", "n_embd")
    if hidden < heads:
        raise ValueError(f"{heads} attention heads share a hidden size of only {hidden}")
    layers = read("num_hidden_layers", "n_layer")
    gated = bool({"intermediate_size", "moe_intermediate_size"} & set(text))
    wide = read("moe_intermediate_size", default=4 * hidden)
    tied = raw.get("tie_word_embeddings", kind in _TIED)
    fields: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": hidden,
        "layers": layers,
        "attention_heads": heads,
        "key_value_heads": read("num_key_value_heads", default=heads),
        "vocabulary": read("vocab_size"),
        "max_positions": read("max_position_embeddings", "n_positions", default=2**20),
        "intermediate_size": read("intermediate_size", "n_inner", default=wide, least=0),
        "head_dim": read("head_dim", default=hidden // heads, least=0),
        "tied_embeddings": bool(text.get("tie_word_embeddings", tied)),
        "gated_mlp": gated and kind not in ("gpt_neox", "opt"),
    }
    if inputs := read("hidden_size_per_layer_input", default=0, least=0):  # Gemma 3n and 4
        fields["layer_input_size"] = inputs
    mixers = _mixers(read, kind, layers)
    if other := _other_layers(read, "states" in mixers):
        fields["other_layers"] = other
    window = read("sliding_window", default=0, least=0)
    if kind in _LOST_WINDOWS and window < fields["max_positions"]:
        fields["lost_window"] = window
    found = fields | _mixture(read, kind, layers) | mixers
    if len(found) > len(fields):
        # Of plain models these are left out: under 0.1 % of their parameters.
        norms = kind.startswith(_NORMED) or bool(read.text.get("use_qk_norm"))
        found["query_key_norms"] = norms
        found["attention_extras"] = _attention_extras(read, kind, found)
    return found


class _Numbers:
    """Whole numbers of a configuration, under the first of several names that has one. Of one for
    each layer (Gemma 3n, Hunyuan) it is the largest."""

    def __init__(self, text: Mapping[str, Any]) -> None:
        self.text = text

    def __call__(self, *names: str, default: int | None = None, least: int = 1) -> int:
        for name in names:
            value = self.text.get(name)
            if isinstance(value, list) and all(isinstance(each, int) for each in value):
                value = max(value, default=None)
            if isinstance(value, int) and not isinstance(value, bool):
                if value < least:
                    raise ValueError(f"{name} is {value}, and must be at least {least}")
                return value
        if default is None:
            raise ValueError(f"the model's config.json has none of {', '.join(names)}")
        return default


def _mixture(read: _Numbers, kind: str, layers: int) -> dict[str, Any]:
    """Return the fields of a mixture of experts; empty for a dense model."""
    experts = read(*_EXPERTS, default=0, least=0)
    if read.text.get("is_moe") is False:  # Doge's configuration has their number all the same.
        return {}
    if experts < 2:
        return {"experts": experts} if experts else {}
    chosen = read(*_CHOSEN)
    if chosen > experts:
        raise ValueError(f"a token is given {chosen} experts of only {experts}")
    width = read("moe_intermediate_size", "intermediate_size")
    count = read(*_SHARED, default=0, least=0)
    shared = read(*_SHARED_WIDTH, default=count * width, least=0)
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_size": width,
        "shared_expert_size": shared,
        "shared_expert_gate": bool(shared) and kind.startswith(_SHARED_GATE),
        "expert_biases": kind == "gpt_oss",
        "float32_gates": not kind.startswith(_NARROW_GATES),
        "dense_layers": sum(not _routed(read, layer) for layer in range(layers)),
    }


def _routed(read: _Numbers, layer: int) -> bool:
    """Tell whether a layer of a mixture has a router."""
    kinds = read.text.get("mlp_layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return bool(kinds[layer] == "sparse")
    if layer < read("first_k_dense_replace", "num_dense_layers", default=0, least=0):
        return False
    if layer in (read.text.get("mlp_only_layers") or ()):
        return False
    # ERNIE's words for the same; -1 stands for the last layer.
    last = read("moe_layer_end_index", default=-1, least=-1)
    if layer < read("moe_layer_start_index", default=0, least=0) or -1 < last < layer:
        return False
    return (layer + 1) % read("decoder_sparse_step", "moe_layer_interval", default=1) == 0


def _mixers(read: _Numbers, kind: str, layers: int) -> dict[str, Any]:
    """Return the fields of what mixes tokens otherwise than plain attention does."""
    found: dict[str, Any] = {}
    if read.text.get("kv_lora_rank"):
        found["latent"] = LatentShape(
            query_rank=read("q_lora_rank", default=0, least=0),
            key_value_rank=read("kv_lora_rank"),
            rope_dim=read("qk_rope_head_dim"),
            plain_dim=read("qk_nope_head_dim"),
            value_dim=read("v_head_dim"),
        )
    with_state = _layers_with_state(read, layers)
    if with_state:
        found["states"] = StateShape(
            layers=with_state,
            key_heads=read("linear_num_key_heads"),
            value_heads=read("linear_num_value_heads"),
            key_dim=read("linear_key_head_dim"),
            value_dim=read("linear_value_head_dim"),
            window=read("linear_conv_kernel_dim", default=4),
        )
    if kind.startswith(_GATED_ATTENTION):
        found["gated_attention"] = True
    return found


def _layers_with_state(read: _Numbers, layers: int) -> int:
    """Count the layers with a gated delta rule: those of type `linear_attention`, by default all
    but each `full_attention_interval`-th."""
    if "linear_num_value_heads" not in read.text:
        return 0
    kinds = read.text.get("layer_types")
    if not isinstance(kinds, list):
        interval = read("full_attention_interval", default=4)
        return layers - layers // interval
    return sum(each == "linear_attention" for each in kinds[:layers])


def _other_layers(read: _Numbers, with_states: bool) -> tuple[str, ...]:
    """Name the types of layers that neither attend to what came before or to a window of it, nor
    have the state of a gated delta rule."""
    kinds = read.text.get("layer_types", read.text.get("layers_block_type"))
    found = {str(each) for each in kinds} if isinstance(kinds, list) else set()
    found -= {*_LAYERS, *(("linear_attention",) if with_states else ())}
    if kinds is None and read("attention_chunk_size", default=0, least=0):  # Llama 4
        found.add("chunked_attention")
    if read("index_topk", "indexer_budget", default=0, least=0):
        found.add("indexed_attention")
    return tuple(sorted(found))


def _attention_extras(read: _Numbers, kind: str, found: Mapping[str, Any]) -> int:
    """Count a layer's numbers beside attention's matrices: norms of queries and keys, biases,
    sinks."""
    head, heads, pairs = (
        found[each] for each in ("head_dim", "attention_heads", "key_value_heads")
    )
    queries, keys = head * heads, head * pairs
    extras = heads if kind == "gpt_oss" else 0
    if found["query_key_norms"]:
        # Those of OLMoE and MiniMax-M2 are as wide as all heads together.
        extras += queries + keys if kind in ("olmoe", "minimax_m2") else 2 * head
    if read.text.get("attention_bias", kind == "gpt_oss") and "latent" not in found:
        extras += queries + 2 * keys
        extras += 0 if kind == "glm4_moe" else found["hidden_size"]
    elif read.text.get("qkv_bias", kind == "qwen2_moe"):
        extras += queries + 2 * keys
    return extras
