"""A policy loss that lets an update go on when a test says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from earl_core.algorithms.policy_losses import LossInputs, PPOClip

if TYPE_CHECKING:
    from torch import Tensor


class HeldLoss(PPOClip):
    """PPO's, once the file `gate` is not there; it holds nobody before the file `after` is."""

    gate: str
    after: str

    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        while Path(self.gate).exists() and Path(self.after).exists():
            time.sleep(0.1)
        return super().per_token(inputs)
