"""Narrow models of a family, with random weights: what is made on the spot."""

from __future__ import annotations

from typing import Any

from earl_core.pretrained.huggingface import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from earl_core.system.errors import ConfigError

_MIXTURE: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32,
}  # fmt: skip
_STATES: dict[str, Any] = {
    "head_dim": 32, "linear_num_key_heads": 6, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {**_MIXTURE, "norm_topk_prob": True},
    "qwen3_5_text": _STATES,
    "qwen3_5_moe_text": {**_STATES, **_MIXTURE, "shared_expert_intermediate_size": 128},
}
"""transformers' name of each, and its own settings; widths that vLLM's CPU build takes, too."""


def narrow_model(
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    hidden: int,
    layers: int,
    heads: int,
    positions: int,
) -> PreTrainedModel:
    """A model with tied embeddings and random weights from torch's generator. Raises ConfigError
    for a family that is not among `FAMILIES`."""
    from transformers import AutoConfig

    if family not in FAMILIES:
        raise ConfigError(
            f"no model of the family {family!r} is made here: set model.builder_options.family to "
            f"one of {', '.join(FAMILIES)}"
        )
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        # The next multiple of 64 above 8/3 of the hidden size, Llama's own proportion.
        intermediate_size=-(-hidden * 8 // (3 * 64)) * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        # The usual 0.02 suits wide models; this narrow one then needs twice the steps.
        initializer_range=hidden**-0.5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **FAMILIES[family],
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
