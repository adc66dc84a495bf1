"""The output layer as it is scored: which entropy is wanted, and a float32 head."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import nn

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
