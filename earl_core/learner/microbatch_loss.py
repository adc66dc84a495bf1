"""The loss of one microbatch, from the algorithm's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.importance import ImportanceCorrection
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.objective import MicrobatchLoss, Objective
from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs, PolicyGradient, PPOClip
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.learner.data.packing import Minibatch, TrainingSample
from earl_core.learner.head import EntropyMode
from earl_core.learner.microbatch_prefetch import FedMicrobatch


@dataclass(frozen=True)
class Evaluated:
    """A microbatch's loss and what went into it: log-probs before the first step, and weights of
    the importance correction or None, float32 [T'].
    """

    result: MicrobatchLoss
    old_logprobs: torch.Tensor
    weights: torch.Tensor | None


class Algorithm:
    """What an update minimises. Raises ConfigError for an unknown name."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._objective = _objective(config)
        correction = config.importance_correction
        self._correction = (
            None if correction is None else ImportanceCorrection(**correction.model_dump())
        )

    @property
    def whole_episodes(self) -> bool:
        """Whether all samples of an episode must be in one microbatch.

        Anything but the two losses known to look at tokens one by one may need it, a loss named by
        import path included.
        """
        by_token = isinstance(self._objective.policy_loss, PolicyGradient | PPOClip)
        by_sequence = self._correction is not None and self._correction.level == "sequence"
        return not by_token or by_sequence

    @property
    def entropy_mode(self) -> EntropyMode:
        """What `evaluate` does with entropies: report them, or learn from them."""
        return "differentiable" if self._objective.entropy_coefficient > 0 else "detached"

    def check_columns(self, samples: Sequence[TrainingSample], steps: int) -> None:
        """Raise ValueError when an update of so many steps needs a column that is missing."""
        needed = {"advantages": "run the advantage stage first"}
        if self._objective.kl is not None:
            needed["reference_logprobs"] = "run the reference stage first"
        if steps > 1 or self._correction is not None:
            needed["old_logprobs"] = "fill it with `score` before the update"
        for sample in samples:
            for name, advice in needed.items():
                if getattr(sample, name) is None:
                    raise ValueError(f"Sample {sample.sample_id} has no {name}: {advice}.")

    def evaluate(
        self,
        fed: FedMicrobatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        minibatch: Minibatch,
    ) -> Evaluated:
        """The loss of the microbatch's trained tokens [T'], as a part of the minibatch's."""
        columns, index = fed.columns, fed.episode_index
        # Without old log-probs there is a single step, so the policy before it is this one.
        old = columns.get("old_logprobs", logprobs.detach())
        episodes = fed.packed.episode_ids.tolist()
        weights = None
        if self._correction is not None:
            weights = self._correction.weights(
                old, columns["rollout_logprobs"], index, len(episodes)
            )
        counts = np.array([minibatch.token_counts[episode] for episode in episodes])
        result = self._objective.microbatch(
            LossInputs(logprobs, old, columns["advantages"], index, len(episodes), weights),
            torch.from_numpy(counts).to(logprobs.device, non_blocking=True),
            minibatch.totals,
            reference_logprobs=columns.get("reference_logprobs"),
            entropy=entropy,
        )
        return Evaluated(result, old, weights)


def _objective(algorithm: AlgorithmConfig) -> Objective:
    in_loss = algorithm.kl.placement == "loss"
    return Objective(
        policy_loss=POLICY_LOSSES.build(algorithm.policy_loss),
        aggregation=AGGREGATIONS.build(algorithm.aggregation),
        kl=KL_ESTIMATORS.build(algorithm.kl.estimator) if in_loss else None,
        kl_coefficient=algorithm.kl.coefficient if in_loss else 0.0,
        entropy_coefficient=algorithm.entropy_coefficient,
    )
