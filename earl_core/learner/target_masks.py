"""Masks of targets on the device: which logits the distribution of each is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from earl_core.learner.data.masks import PackedMasks
from earl_core.tensors.token_masks import forbid

_FORBIDDEN = -1e9
"""A logit whose exponential is 0 in float32 beside any other. Finite, because the slope of an
entropy is a product with it."""

_LOGITS_PER_STEP = 2**24
"""That are masked at a time, which takes about 13 bytes for each beside a chunk's."""


@dataclass(frozen=True)
class TargetMasks:
    """rows, index: see `PackedMasks`."""

    rows: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(cls, packed: PackedMasks | None, device: torch.device | str) -> TargetMasks | None:
        """Move masks to the device. They are rare and few, so that the copy is waited for."""
        if packed is None or not (packed.index >= 0).any():
            return None
        rows, index = (torch.from_numpy(each).to(device) for each in (packed.rows, packed.index))
        return cls(rows, index)

    def apply(self, logits: torch.Tensor, positions: slice, first: int) -> None:
        """Forbid tokens of the targets at these positions, in place. logits: [n, tokens], float32.
        first: the token of the first column."""
        index = self.index[positions]
        held = (index >= 0).nonzero()[:, 0]
        step = max(1, _LOGITS_PER_STEP // max(1, logits.shape[1]))
        for at in torch.split(held, step):
            some = logits[at]
            forbid(some, self.rows[index[at]], _FORBIDDEN, first)
            logits[at] = some
