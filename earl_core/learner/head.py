"""A model's decoder and output layer (head), and a head that multiplies in float32."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import nn

from earl_core.config import ConfigError
from earl_core.pretrained.huggingface import PreTrainedModel

EntropyMode = Literal["none", "detached", "differentiable"]


class Float32Head:
    """An output layer that multiplies in float32.

    rounded: the dtype in which the engine has the weights; they are rounded to it, so that both
    sides multiply with the same numbers. Gradients reach the weights unrounded.
    """

    def __init__(self, head: nn.Module, rounded: torch.dtype | None) -> None:
        weight = cast(torch.Tensor, head.weight).float()
        if rounded is not None:
            weight = weight + (weight.to(rounded).float() - weight).detach()
        self.weight = weight
        self.bias = cast("torch.Tensor | None", getattr(head, "bias", None))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)


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
