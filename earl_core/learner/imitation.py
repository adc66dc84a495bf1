"""What an iteration's update is to do: with demonstrations, lower the cross entropy to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from earl_core.algorithms.objective import MicrobatchLoss
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.imitation import ImitationConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.samples import Minibatch
from earl_core.learner.microbatches import Algorithm, Evaluated, FedMicrobatch
from earl_core.learner.state.optimizer import learning_rate


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
        return Evaluated(result, logprobs.detach(), None)


class Aim(NamedTuple):
    """An update's objective and learning rate, its epochs and the optimizer steps of each. fresh:
    it is the first of another objective, so that moments of the gradients before say nothing."""

    algorithm: Algorithm
    learning_rate: float
    epochs: int
    minibatches: int
    fresh: bool = False


def aim_of(
    iteration: int,
    iterations: int,
    update: UpdateConfig,
    algorithm: Algorithm,
    imitation: ImitationConfig | None,
    resting: int = 0,
) -> Aim:
    """What the update of an iteration, of so many, is to do. algorithm: of the iterations that
    play, whose schedule counts them alone, without the first `resting`, which train nothing."""
    first = resting if imitation is None else imitation.iterations
    if imitation is not None and iteration < first:
        steps = imitation.minibatches or update.minibatches
        return Aim(Imitation(), imitation.learning_rate, 1, steps)
    # A profile measures updates that a run would not begin with.
    rate = learning_rate(update, max(0, iteration - first), iterations - first)
    fresh = imitation is not None and iteration == first
    return Aim(algorithm, rate, update.epochs, update.minibatches, fresh)
