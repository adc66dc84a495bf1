"""The critic's objective: values near the returns, and not far from what they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from earl_core.algorithms.objective import MicrobatchLoss
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.samples import Minibatch
from earl_core.learner.microbatches import Algorithm, Evaluated, FedMicrobatch


class ValueRegression(Algorithm):
    """The mean over the time steps of a minibatch of max((V - R)^2, (V' - R)^2) / 2.

    R is the return, the advantage and the value that it was relative to; V' is V kept within `clip`
    of that value, in reward units, as in PPO's own code: a step that would go further has no
    gradient. None: V alone counts.
    """

    of_values = True
    stage = "critic"

    def __init__(self, clip: float | None) -> None:
        super().__init__(AlgorithmConfig())
        self._clip = clip

    def comparable(self, step: int) -> bool:
        """False: there are no log-probs to compare."""
        return False

    def check_columns(self, samples: Sequence[TrainingSample], steps: int) -> None:
        """Raise ValueError where the values or the advantages are missing."""
        for sample in samples:
            for name in ("values", "advantages"):
                if getattr(sample, name) is None:
                    raise ValueError(
                        f"Sample {sample.sample_id} has no {name}: run the value and the advantage "
                        "stage first."
                    )

    def evaluate(
        self,
        fed: FedMicrobatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        minibatch: Minibatch,
    ) -> Evaluated:
        """The loss of the microbatch's time steps, as a part of the minibatch's. logprobs: values
        float32 [T']."""
        values, old = logprobs, fed.columns["values"]
        returns, count = old + fed.columns["advantages"], minibatch.totals.n_tokens
        loss, metrics = (values - returns).square(), {}
        if self._clip is not None:
            kept = old + (values - old).clamp(-self._clip, self._clip)
            clipped = (kept - returns).square()
            metrics["clip_fraction"] = (clipped > loss).detach().float().sum() / count
            loss = torch.maximum(loss, clipped)
        return Evaluated(MicrobatchLoss(0.5 * loss.sum() / count, metrics), values.detach(), None)
