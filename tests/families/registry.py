"""Families of models that were tried, each as a small random model: `docs/models.md` lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.learner.helpers import VOCABULARY

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""What most have in common: heads of 32, the narrowest that vLLM's CPU build knows."""


@dataclass(frozen=True)
class Family:
    """A row of the table.

    `own` is its configuration beside `SHAPE`; `config` and `model` begin the names of its classes,
    where these are not its key. `spread` is how many times their usual its weights vary: 0.02, the
    usual of most, gives nearly uniform attention, which would hide errors; where logits or states
    grow large, float32 rounds by more than is compared.
    """

    title: str
    own: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    model: str = ""
    spread: float = 5.0

    @property
    def experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return any("experts" in name for name in self.own)


def build(name: str, seed: int = 11, **more: Any) -> PreTrainedModel:
    """A random model of the family, with other settings where they are given."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family.config or name}Config")(
        **{**SHAPE, **family.own, **more}
    )
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    made: PreTrainedModel = getattr(transformers, f"{family.model or name}{head}")(config)
    return made


_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_WINDOWS = {"sliding_window": 9, **_LAYERS}
_HEADS = {"head_dim": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 1.5, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 24,
}  # fmt: skip
_SMALL_LATENT = {**_LATENT, "q_lora_rank": 32, "initializer_range": 0.02}
_GEMMA = {**_HEADS, "sliding_window": 9, "query_pre_attn_scalar": 32}
_GRANITE = {
    "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}  # fmt: skip
_STATES = {
    **_HEADS, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_STATE_EXPERTS = {**_STATES, **_EXPERTS, "shared_expert_intermediate_size": 64}
_SPARSE = {
    **_ROUTED, **_LATENT, "q_lora_rank": 32, "index_n_heads": 2, "index_head_dim": 32,
    "index_topk": 4,
}  # fmt: skip

# Small enough to bend what they cap.
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
_NO_CAPS: dict[str, Any] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}

_ATTENDING = {
    "Llama": Family("Llama (also SmolLM2)"),
    "Qwen2": Family("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3": Family("Qwen3", _HEADS),
    "Mistral": Family("Mistral", {"sliding_window": 9}),
    "Ministral": Family("Ministral", {**_HEADS, **_WINDOWS}),
    "Ministral3": Family("Ministral3", _HEADS, spread=4.0),
    "Gemma": Family("Gemma", _HEADS),
    "Gemma2": Family("Gemma2", {**_GEMMA, **_CAPS}),
    "Gemma2Logits": Family(
        "Gemma2 with soft caps on logits alone",
        {**_GEMMA, **_CAPS, "attn_logit_softcapping": None}, "Gemma2", "Gemma2",
    ),
    "Gemma2Plain": Family(
        "Gemma2 without soft caps", {**_GEMMA, **_NO_CAPS}, "Gemma2", "Gemma2"
    ),
    "Gemma3": Family("Gemma3 (text)", {**_GEMMA, **_LAYERS}, "Gemma3Text"),
    "Gemma3n": Family(
        "Gemma3n (text)",
        {**_HEADS, **_WINDOWS, "intermediate_size": [128, 128], "num_kv_shared_layers": 0,
         "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
         "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0], "altup_num_inputs": 2,
         "final_logit_softcapping": 5.0},
        "Gemma3nText",
    ),
    "Gemma4": Family(
        "Gemma4 (text)",
        {**_HEADS, **_WINDOWS, "global_head_dim": 32, "num_kv_shared_layers": 0,
         "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY},
        "Gemma4Text",
    ),
    "VaultGemma": Family(
        "VaultGemma without caps on scores",
        {**_GEMMA, **_LAYERS, **_CAPS, "attn_logit_softcapping": None},
    ),
    "Phi": Family("Phi"),
    "Phi3": Family("Phi3 (also Phi-4)", {"sliding_window": 9}),
    "Olmo": Family("OLMo"),
    "Olmo2": Family("OLMo2"),
    "Olmo3": Family("OLMo3", _WINDOWS, spread=3.0),
    "GPT2": Family("GPT-2"),
    "GPTNeoX": Family("GPT-NeoX"),
    "GPTBigCode": Family("GPT-BigCode", {"activation_function": "gelu"}),
    "OPT": Family("OPT", {"ffn_dim": 128, "word_embed_proj_dim": 128, "layerdrop": 0.5}),
    "Persimmon": Family("Persimmon", {"num_key_value_heads": 4}),
    "Starcoder2": Family("StarCoder2", {"sliding_window": 9}),
    "SmolLM3": Family("SmolLM3", spread=3.0),
    "Granite": Family("Granite", _GRANITE),
    "GraniteSWA": Family("Granite with windows", {**_GRANITE, **_WINDOWS}),
    "Cohere": Family("Cohere (Command R)", {"logit_scale": 0.3}),
    "Cohere2": Family("Cohere2 (Command R7B)", {**_WINDOWS, "logit_scale": 0.3}),
    "Glm": Family("GLM", _HEADS),
    "Glm4": Family("GLM-4", _HEADS),
    "Ernie4_5": Family("ERNIE 4.5", _HEADS),
    "Exaone4": Family("EXAONE 4", _WINDOWS),
    "HyperCLOVAX": Family("HyperCLOVA X", {"logits_scaling": 0.3}),
    "NanoChat": Family("nanochat", {"final_logit_softcapping": 5.0}),
    "MiniCPM3": Family("MiniCPM3", _SMALL_LATENT, spread=1.0),
    "HunYuanDenseV1": Family("HunYuan v1 (dense)", _HEADS),
    "Youtu": Family("Youtu", _SMALL_LATENT, spread=2.0),
    "Apertus": Family("Apertus"),
    "Arcee": Family("Arcee"),
    "Jais2": Family("Jais 2", _HEADS),
    "Cwm": Family("CWM", {**_HEADS, **_WINDOWS}),
    "SeedOss": Family("Seed-OSS", _HEADS),
    "DiffLlama": Family("DiffLlama", spread=3.0),
    "Helium": Family("Helium", _HEADS),
    "HrmText": Family("HRM-Text", spread=3.0),
}  # fmt: skip

_MIXTURES = {
    "Qwen2Moe": Family("Qwen2-MoE", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "Qwen3Moe": Family("Qwen3-MoE", {**_HEADS, **_EXPERTS, "norm_topk_prob": True}),
    # Noise in training mode.
    "Mixtral": Family("Mixtral", {**_LOCAL, "router_jitter_noise": 0.1}),
    "Olmoe": Family("OLMoE", {"num_experts": 4, "num_experts_per_tok": 2}),
    "FlexOlmo": Family("FlexOLMo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Glm4Moe": Family("GLM-4-MoE", {**_HEADS, **_ROUTED}),
    "Glm4MoeLite": Family(
        "GLM-4.7-Flash (`Glm4MoeLite`)", {**_ROUTED, **_LATENT, "q_lora_rank": 32}
    ),
    "GptOss": Family(
        "gpt-oss",
        {**_HEADS, **_LOCAL, **_WINDOWS,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    # Noise in training mode.
    "Phimoe": Family(
        "PhiMoE without a window",
        {**_LOCAL, "sliding_window": None, "router_jitter_noise": 0.1},
    ),
    "DeepseekV2": Family(
        "DeepSeek-V2", {**_ROUTED, **_LATENT, "topk_method": "greedy", "head_dim": 16}
    ),
    "DeepseekV3": Family("DeepSeek-V3", {**_ROUTED, **_LATENT}),
    "Afmoe": Family(
        "AFMoE",
        {**_HEADS, **_EXPERTS, **_WINDOWS, "num_dense_layers": 1, "num_shared_experts": 1},
    ),
    "Ernie4_5_Moe": Family(
        "ERNIE 4.5 (mixture)",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64,
         "moe_num_shared_experts": 1},
    ),
    "GraniteMoe": Family("GraniteMoe", {**_GRANITE, **_LOCAL}),
    "GraniteMoeSWA": Family("GraniteMoe with windows", {**_GRANITE, **_LOCAL, **_WINDOWS}),
    "GraniteMoeShared": Family(
        "GraniteMoeShared", {**_GRANITE, **_LOCAL, "shared_intermediate_size": 64}
    ),
    "Cohere2Moe": Family(
        "Cohere2Moe (Command A)", {**_HEADS, **_EXPERTS, **_WINDOWS, "logit_scale": 0.3}
    ),
    "HYV3": Family("HunYuan v3", {**_HEADS, **_EXPERTS, "first_k_dense_replace": 1}),
    "MiniMaxM2": Family("MiniMax-M2", {**_HEADS, **_LOCAL}),
    "Laguna": Family("Laguna", {**_HEADS, **_EXPERTS, "shared_expert_intermediate_size": 64}),
    "Mellum": Family("Mellum", {**_HEADS, **_EXPERTS}),
    "SolarOpen": Family("Solar Open", {**_HEADS, **_ROUTED}),
    "ExaoneMoe": Family("EXAONE MoE", {**_EXPERTS, **_WINDOWS}),
    "JetMoe": Family("JetMoe", {**_LOCAL, "kv_channels": 32}),
}  # fmt: skip

# With a larger spread float32 rounds a recurrence by more than what is compared: other chunks of
# plain transformers are 1e-5 apart.
_HYBRIDS = {
    "Qwen3_5": Family(
        "Qwen3.5 (dense)",
        {**_STATES, "tie_word_embeddings": True, "num_hidden_layers": 3,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        "Qwen3_5Text", spread=2.0,
    ),
    "Qwen3_5Moe": Family(
        "Qwen3.5 (mixture)", _STATE_EXPERTS, "Qwen3_5MoeText", spread=2.0
    ),
    "Qwen3Next": Family("Qwen3-Next", _STATE_EXPERTS, spread=2.0),
    "OlmoHybrid": Family("OLMo hybrid", _STATES, spread=2.0),
}  # fmt: skip

UNTRAINED = {
    "Falcon": Family("Falcon", {"new_decoder_architecture": True, "alibi": False}),
    "PhimoeWindow": Family(
        "PhiMoE with a window", {**_LOCAL, "sliding_window": 9}, "Phimoe", "Phimoe"
    ),
    "Lfm2": Family("LFM2", {"layer_types": ["conv", "full_attention"]}),
    "KimiLinear": Family(
        "Kimi Linear",
        {**_STATES, **_LATENT, "v_head_dim": 16, "num_experts": 4, "num_experts_per_token": 2,
         "moe_intermediate_size": 32},
    ),
    "MiniMax": Family(
        "MiniMax", {**_HEADS, **_LOCAL, "layer_types": ["linear_attention", "full_attention"]}
    ),
    "Qwen4Exp": Family(
        "Qwen4-Exp",
        {**_STATE_EXPERTS, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2,
         "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 8,
         "indexer_compress_ratio": 2},
        "Qwen4ExpText",
    ),
    "FalconH1": Family(
        "Falcon-H1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
         "mamba_d_state": 8, "mamba_chunk_size": 8, "head_dim": 16},
    ),
    "Mistral4": Family("Mistral 4", {**_ROUTED, **_LATENT, "q_lora_rank": 32}),
    "StableLm": Family("StableLM"),
    "Nemotron": Family("Nemotron"),
    "Bloom": Family("BLOOM", {"n_layer": 2, "n_head": 4}),
    "Mpt": Family("MPT"),
    "GPTJ": Family("GPT-J", {"rotary_dim": 16}),
    "GPTNeo": Family("GPT-Neo", {"attention_types": [[["global", "local"], 1]]}),
    "Mamba": Family("Mamba"),
    "DeepseekV32": Family("DeepSeek-V3.2", _SPARSE),
    "GlmMoeDsa": Family("GLM-5 (`GlmMoeDsa`)", _SPARSE),
    "AXK2": Family("A.X K2", _SPARSE),
    "HYV4": Family("HunYuan v4", _SPARSE),
    "MiniMaxM3VL": Family(
        "MiniMax-M3",
        {**_HEADS, **_LOCAL, "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 4,
         "index_topk_blocks": 1, "layer_types": ["full_attention", "minimax_m3_sparse"],
         "dense_intermediate_size": 96, "shared_intermediate_size": 32},
        "MiniMaxM3VLText",
    ),
    "Llama4": Family(
        "Llama 4",
        {"attention_chunk_size": 9, "num_local_experts": 2, "head_dim": 32,
         "intermediate_size_mlp": 96, "layer_types": ["chunked_attention", "full_attention"]},
        "Llama4Text",
    ),
}  # fmt: skip
"""Those that are refused before anything is trained."""

FAMILIES: dict[str, Family] = {**_ATTENDING, **_MIXTURES, **_HYBRIDS, **UNTRAINED}
"""By the name of transformers' class, or one of our own where a family has several rows."""
