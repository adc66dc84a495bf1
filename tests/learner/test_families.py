"""Model families beside Llama's: log-probs equal plain transformers, or a refusal that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from earl_core.config import ConfigError
from tests.learner.helpers import eager_model, plain_logprobs, random_samples, save_model
from tests.learner.test_policy_learner import TEMPERATURE, make_learner

_SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GEMMA = {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 32}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 1,
}  # fmt: skip


def build(family: str, model: str = "", **more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **more})
    made: transformers.PreTrainedModel = getattr(transformers, model or f"{family}ForCausalLM")(
        config
    )
    return made


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Qwen3", {"head_dim": 32}),
        ("Phi3", {"sliding_window": 9}),
        ("Gemma2", {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
        # Noise in training mode: in the router, in the number of layers.
        ("Phimoe", {**_EXPERTS, "sliding_window": None, "router_jitter_noise": 0.1}),
        ("Mixtral", {**_EXPERTS, "router_jitter_noise": 0.1}),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "layerdrop": 0.5}),
        # Keys and values of different widths.
        ("DeepseekV3", _DEEPSEEK),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_family_equals_plain_transformers(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    directory = save_model(build(family, **more), tmp_path)
    samples = random_samples(6, seed=5, longest=60)
    learner = make_learner(directory, max_tokens_per_microbatch=128)
    scored = learner.score(samples)
    plain = eager_model(directory)
    for sample, found in zip(samples, scored, strict=True):
        expected, _ = plain_logprobs(plain, sample, TEMPERATURE)
        np.testing.assert_allclose(found[sample.loss_mask == 1], expected.detach(), atol=3e-5)
    again = learner.score(samples)
    assert all(np.array_equal(a, b) for a, b in zip(scored, again, strict=True))


@pytest.mark.parametrize(
    ("family", "model", "more", "why"),
    [
        ("Falcon", "", {"new_decoder_architecture": True, "alibi": False}, "attention interface"),
        ("Gemma2", "", {**_GEMMA, "attn_logit_softcapping": None}, "logits have soft caps"),
        ("Phimoe", "", {**_EXPERTS, "sliding_window": 9}, "sliding window of 9 tokens"),
        (
            "Llama4Text", "Llama4ForCausalLM",
            {"attention_chunk_size": 9, "num_local_experts": 2, "head_dim": 16,
             "intermediate_size_mlp": 96, "layer_types": ["chunked_attention", "full_attention"]},
            "attends within chunks",
        ),
    ],
    ids=["falcon", "gemma2", "phimoe", "llama4"],
)  # fmt: skip
def test_what_packing_would_get_wrong_is_refused(
    family: str, model: str, more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    directory = save_model(build(family, model, **more), tmp_path)
    with pytest.raises(ConfigError, match=why):
        make_learner(directory)
