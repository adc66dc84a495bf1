"""An output layer (head) that multiplies in float32: the engine's side of `HeadScore`."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn


class Float32Head:
    """A map from hidden states to float32 logits, whatever the model's dtype is; to be made anew
    when the weights change. Both sides have the weights in the model's dtype, and so multiply with
    the same numbers."""

    def __init__(self, head: nn.Module) -> None:
        self.weight = cast(torch.Tensor, head.weight).float()
        bias = cast("torch.Tensor | None", getattr(head, "bias", None))
        self.bias = None if bias is None else bias.float()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden.float(), self.weight, self.bias)
