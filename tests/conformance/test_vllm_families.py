"""Two iterations of each family that vLLM plays against the float64 reference: what its engine
says before and after new weights, and what is learnt of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_whole_iterations import configured, equal_to_the_reference, save
from tests.engines.forked import forked_engines

pytest.importorskip("vllm")

_HEADS = {"head_dim": 32}
_ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
"""Of 32, the smallest that vLLM has on a CPU."""
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
"""Shorter than a prompt."""
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32}
_TIED = {"tie_word_embeddings": True}
"""As vLLM has it, whatever the files say."""
_CAPPED = {"query_pre_attn_scalar": 32, **_HEADS, **_WINDOWS, **_TIED}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _HEADS,
    "Qwen2": _ONE_HEAD,
    "Qwen3": _HEADS,
    "Mistral": {**_HEADS, "sliding_window": 16},
    "Ministral3": _HEADS,
    "Granite": {**_ONE_HEAD, "logits_scaling": 0.4, "embedding_multiplier": 2.0,
                "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "Cohere2": {**_HEADS, **_WINDOWS, **_TIED, "logit_scale": 1.5},
    "Gemma2": {**_CAPPED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    "Gemma3Text": _CAPPED,
    "Phi3": {**_ONE_HEAD, "sliding_window": None},
    "Phi": _ONE_HEAD,
    "Olmo2": _ONE_HEAD,
    "Olmo3": {**_ONE_HEAD, **_WINDOWS},
    "SmolLM3": {**_HEADS, "no_rope_layers": [1, 0]},
    "Glm": _HEADS,
    "Glm4": _HEADS,
    "GPT2": _ONE_HEAD,
    "Qwen3Moe": {**_HEADS, **_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "Mixtral": {**_HEADS, **_EXPERTS, "num_local_experts": 4},
    "Olmoe": {**_ONE_HEAD, **_EXPERTS, "num_experts": 4},
    "Glm4Moe": {**_HEADS, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1,
                "first_k_dense_replace": 1},
}  # fmt: skip

ALGORITHM = {
    "policy_loss": {"name": "ppo_clip", "clip_low": 0.02, "clip_high": 0.02},
    "advantage": {"name": "rloo"}, "aggregation": {"name": "token_mean"},
    "kl": {"placement": "loss", "estimator": "k3", "coefficient": 0.2},
}  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("family", FAMILIES)
def test_two_iterations_on_vllm_equal_the_reference(family: str, tmp_path: Path) -> None:
    model = save(family, FAMILIES[family], tmp_path / "model")
    config = configured(model, ALGORITHM, tmp_path, iterations=2)
    config["rollout"] |= {"engine": "vllm", "vllm": {"kv_cache_gib": 1}}
    with forked_engines():
        assert len([*equal_to_the_reference(config, model, tmp_path, nats=1e-5)]) == 2
