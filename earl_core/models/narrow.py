"""Narrow models of a family, with random weights: what is made on the spot."""

from __future__ import annotations

from earl_core.models.foreseen import Sizes
from earl_core.pretrained.huggingface import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)


def narrow_model(
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    hidden: int,
    layers: int,
    heads: int,
    positions: int,
) -> PreTrainedModel:
    """A model with tied embeddings and random weights from torch's generator. Raises ConfigError
    for a family that is not among `foreseen.FAMILIES`."""
    from transformers import AutoConfig

    sizes = Sizes(family, hidden, layers, heads, positions)
    config = AutoConfig.for_model(
        **sizes.settings(len(tokenizer)),
        # The usual 0.02 suits wide models; this narrow one then needs twice the steps.
        initializer_range=hidden**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
