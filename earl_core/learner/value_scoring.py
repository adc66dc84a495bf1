"""What a critic makes of hidden states: values in place of log-probs."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from earl_core.learner.lm_head import EntropyMode
from earl_core.learner.model import PackedTensors, Scoring
from earl_core.pretrained.logit_transform import NO_TRANSFORM


class ValueScoring(Scoring):
    """Values in place of log-probs: of each trained token what is expected before it is sampled.

    copies: tensor-parallel ranks, each of which has the whole head.
    """

    def __init__(self, head: nn.Module, copies: int = 1) -> None:
        super().__init__(head, NO_TRANSFORM)
        self.copies = copies

    def forward(
        self, states: torch.Tensor, packed: PackedTensors, temperature: float, entropy: EntropyMode
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values float32 [T'] of the trained tokens, multiplied in float32; no entropies."""
        weight = cast(torch.Tensor, self.head.weight)
        if self.copies > 1 and weight.requires_grad:
            # Ranks add the gradients of what each holds whole up, as parts of one; here all are it.
            weight = weight.view_as(weight)
            weight.register_hook(lambda gradient: gradient / self.copies)  # type: ignore[no-untyped-call]
        rows = states.index_select(0, packed.predictors)
        return (rows.float() @ weight.float().t())[:, 0], None
