"""Shapes of mixtures and of models with states against the models that transformers makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from earl_core.deployment.shapes import ModelShape
from earl_core.selector.model.catalogue import MODELS
from tests.selector.released import RELEASED

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "intermediate_size": 96,
    "head_dim": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUTED = {"moe_intermediate_size": 40, "num_experts_per_tok": 3}
STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
}
GROUPS = {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
SHARED = {"shared_expert_intermediate_size": 56}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**ROUTED, "num_experts": 8}),
    "some dense layers": (
        "qwen3_moe",
        {**ROUTED, "num_experts": 8, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    ),
    "biases": ("qwen3_moe", {**ROUTED, "num_experts": 8, "attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", {**ROUTED, **SHARED, "num_experts": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}),
    "glm4_moe": (
        "glm4_moe",
        {**ROUTED, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 2},
    ),
    "glm4_moe with norms": (
        "glm4_moe",
        {**ROUTED, "n_routed_experts": 8, "use_qk_norm": True, "attention_bias": True},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**ROUTED, **LATENT, **GROUPS, "n_routed_experts": 8, "first_k_dense_replace": 1},
    ),
    "queries without a latent": (
        "deepseek_v3",
        {**ROUTED, **LATENT, **GROUPS, "n_routed_experts": 8, "q_lora_rank": None},
    ),
    "qwen3_next": ("qwen3_next", {**ROUTED, **SHARED, **STATES, "num_experts": 8}),
    "qwen3_5": ("qwen3_5_text", {**STATES, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**ROUTED, **SHARED, **STATES, "num_experts": 8}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "granitemoeshared": (
        "granitemoeshared",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 56,
            "head_dim": 16,
        },
    ),
}


def on_meta(kind: str, raw: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**raw))


def check(model: nn.Module, shape: ModelShape) -> None:
    """Compare all parameters, and those that work for a token: of the experts' tensors, [experts,
    ...], as many as a token is given."""
    named = dict(model.named_parameters())
    assert shape.parameters == sum(each.numel() for each in named.values())
    of_experts = sum(each.numel() for name, each in named.items() if ".experts." in name)
    idle = shape.experts and of_experts * (shape.experts - shape.experts_per_token) / shape.experts
    assert shape.active_parameters == shape.parameters - idle
    layers: dict[str, int] = {}
    for name, each in named.items():
        if name.startswith("model.layers."):
            layers[name.split(".")[2]] = layers.get(name.split(".")[2], 0) + each.numel()
    assert len(layers) == shape.layers
    assert shape.largest_layer() == max(layers.values())


@pytest.mark.parametrize("case", CASES)
def test_a_shape_counts_the_parameters_of_a_family(case: str) -> None:
    kind, sizes = CASES[case]
    model = on_meta(kind, {**SMALL, **sizes})
    check(model, ModelShape.from_config(model.config.to_dict()))  # type: ignore[operator, union-attr]


def test_experts_are_seen_under_all_their_names() -> None:
    """ERNIE's own; and Doge's configuration has their number without any."""
    named = {
        "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": 40,
        "moe_layer_start_index": 1, "moe_layer_end_index": 3,
    }  # fmt: skip
    model = on_meta("ernie4_5_moe", {**SMALL, **named})
    shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
    assert (shape.experts, shape.experts_per_token, shape.routed_layers) == (8, 3, 3)
    biases = 3 * 8  # of its routers' choice, which nobody trains
    assert shape.parameters + biases == sum(each.numel() for each in model.parameters())
    doge = {**SMALL, "model_type": "doge", "num_experts": 16384, "num_experts_per_tok": 64}
    assert ModelShape.from_config({**doge, "is_moe": False}).experts == 0
    assert ModelShape.from_config({**doge, "is_moe": True}).experts == 16384


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_a_second_table_of_embeddings_is_counted(kind: str) -> None:
    """By default it has nearly half of the parameters, and Gemma 3n a width for each layer."""
    model = on_meta(kind, {})
    shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
    expected = sum(each.numel() for each in model.parameters())
    assert shape.parameters == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", RELEASED)
def test_a_shape_counts_the_parameters_of_a_released_mixture(name: str) -> None:
    raw = RELEASED[name]
    check(on_meta(raw["model_type"], raw), ModelShape.from_config(raw))


@pytest.mark.parametrize("name", RELEASED)
def test_the_catalogue_has_what_a_released_configuration_says(name: str) -> None:
    known, read = MODELS[name], ModelShape.from_config(RELEASED[name])
    assert known.model_type == read.model_type.removesuffix("_text")
    assert known == read.model_copy(update={"model_type": known.model_type})
