"""The objective of iterations that imitate: cross entropy to the tokens of demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from earl_core.algorithms.objective import MicrobatchLoss
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.samples import Minibatch
from earl_core.learner.microbatches import Algorithm, Evaluated, FedMicrobatch


class Imitation(Algorithm):
    """The mean of -log p over the trained tokens of a minibatch, p at temperature 1.

    Nobody of this run has sampled the tokens, so neither advantages nor other log-probs count, nor
    any setting of the run's algorithm.
    """

    supervised = True

    def __init__(self) -> None:
        super().__init__(AlgorithmConfig())

    def check_columns(self, samples: Sequence[TrainingSample], steps: int) -> None:
        """Tokens and masks are all that is needed, and every row has them."""

    def evaluate(
        self,
        fed: FedMicrobatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        minibatch: Minibatch,
    ) -> Evaluated:
        """The loss of the microbatch's trained tokens [T'], as a part of the minibatch's."""
        count = minibatch.totals.n_tokens
        metrics = {} if entropy is None else {"entropy": entropy.detach().float().sum() / count}
        result = MicrobatchLoss(-logprobs.float().sum() / count, metrics)
        return Evaluated(result, logprobs.detach(), None, None)
