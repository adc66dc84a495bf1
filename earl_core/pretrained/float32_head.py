"""An output layer (head) that multiplies in float32, for engine and trainer alike."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn


class Float32Head:
    """From hidden states to float32 logits, whatever the model's dtype is; to be made anew when the
    weights change.

    rounded: the dtype in which the engine has the weights; they are rounded to it, so that both
    sides multiply with the same numbers. Gradients reach the weights unrounded.
    """

    def __init__(self, head: nn.Module, rounded: torch.dtype | None = None) -> None:
        weight = cast(torch.Tensor, head.weight).float()
        if rounded is not None:
            weight = weight + (weight.to(rounded).float() - weight).detach()
        bias = cast("torch.Tensor | None", getattr(head, "bias", None))
        self.weight = weight
        self.bias = None if bias is None else bias.float()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden.float(), self.weight, self.bias)
