"""A model's decoder and output layer (head), and a critic's in its place."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import nn

from earl_core.config import ConfigError
from earl_core.pretrained.huggingface import PreTrainedModel

EntropyMode = Literal["none", "detached", "differentiable"]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of the model below the head (`model`, `transformer`, ...)."""
    decoder = cast(Any, model).get_decoder()
    if decoder is model:
        decoder = model.base_model
    # Some say that their decoder is the whole model.
    return cast(nn.Module, cast(Any, model).model if decoder is model else decoder)


def head_of(model: PreTrainedModel) -> nn.Module:
    """The output layer. Raises ConfigError for a model without one."""
    head = cast(Any, model).get_output_embeddings()
    if head is None:
        raise ConfigError(f"{type(model).__name__} has no output layer: it is no language model.")
    return cast(nn.Module, head)


class ValueHead(nn.Linear):
    """[hidden] → [1], without a bias. It begins with zeros, so that a critic expects nothing before
    it has learnt, whatever the model was."""


def give_value_head(model: PreTrainedModel) -> None:
    """Put a value head in the place of the output layer, with which nothing is tied any more."""
    weight = cast(torch.Tensor, head_of(model).weight)
    head = ValueHead(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(head.weight)
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
