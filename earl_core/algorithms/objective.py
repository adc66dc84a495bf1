"""A microbatch's loss: policy loss, KL to the reference, entropy bonus, aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from earl_core.algorithms.aggregation import Aggregation, Totals
from earl_core.algorithms.kl import KLEstimator
from earl_core.algorithms.policy_losses import CLIPPED, LossInputs, PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicrobatchLoss:
    """Result of :meth:`Objective.microbatch`.

    Attributes:
        loss: Scalar float32 with gradient; its sum over microbatches and ranks is the minibatch's
            loss.
        metrics: Scalars float32 without gradient, additive in the same way: ``loss/*`` are the
            parts of the loss, the others means over the minibatch's trained tokens: those that
            are computed, and where a diagnostic is 0 without an advantage all of them.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss: sum_t w_t (policy_t + kl_coefficient * kl_t - entropy coefficient * H_t).

    Attributes:
        policy_loss: Per-token policy loss.
        aggregation: Weights of the tokens.
        kl: Estimator of the KL in the loss; None if there is none or it is in the reward.
        kl_coefficient: Loss per nat of KL, where a microbatch has no other.
        entropy_coefficient: What a nat of entropy takes off a token's loss. With 0 the entropy need
            not carry a gradient.
    """

    policy_loss: PolicyLoss
    aggregation: Aggregation
    kl: KLEstimator | None = None
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if self.kl is None and self.kl_coefficient > 0.0:
            raise ValueError(
                "A KL term in the loss needs an estimator, and has the coefficient "
                f"{self.kl_coefficient} without one."
            )

    def microbatch(
        self,
        inputs: LossInputs,
        token_counts: Tensor,
        totals: Totals,
        *,
        reference_logprobs: Tensor | None = None,
        kl_coefficient: float | Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> MicrobatchLoss:
        """Loss and metrics of one microbatch of T trained tokens.

        Args:
            inputs: The tokens.
            token_counts: Trained tokens of each local episode in the whole minibatch, int64
                [n_episodes].
            totals: Sizes of the whole minibatch.
            reference_logprobs: float [T]; required if there is a KL term.
            kl_coefficient: In place of the objective's own, of all tokens or float [T].
            entropy: Entropy of each token's distribution in nats, float [T]; required if the
                bonus is active, else only reported.

        Raises:
            ValueError: A tensor that a configured term needs is missing.
        """
        weights = self.aggregation.weights(token_counts, inputs.episode_index, totals)
        policy, diagnostics = self.policy_loss.per_token(inputs)
        total = policy
        metrics = {"loss/policy": (weights * policy.detach()).sum()}
        if self.kl is not None:
            if reference_logprobs is None:
                raise ValueError("The KL term needs `reference_logprobs`; run the reference stage.")
            both = inputs.logprobs.float(), reference_logprobs.float()
            kl = self.kl.loss(*both)
            coefficient = self.kl_coefficient if kl_coefficient is None else kl_coefficient
            total = total + coefficient * kl
            if not isinstance(coefficient, float):
                # Nobody need have scored what costs nothing.
                kl = kl * (coefficient > 0)
            metrics["loss/kl"] = (coefficient * (weights * kl.detach())).sum()
            diagnostics["reference_kl"] = kl.detach()
            bounded = self.kl.bounded(both[0].detach(), both[1])
            if bounded is not None:
                diagnostics["kl_bounded_share"] = bounded
        if self.entropy_coefficient > 0.0:
            if entropy is None:
                raise ValueError(
                    "The entropy bonus needs `entropy`; compute it with the log-probs."
                )
            bonus = -self.entropy_coefficient * entropy.float()
            total = total + bonus
            metrics["loss/entropy"] = (weights * bonus.detach()).sum()
        if entropy is not None:
            diagnostics["entropy"] = entropy.detach().float()
        for name, values in diagnostics.items():
            skipped = 0 if name in CLIPPED else totals.n_skipped
            metrics[name] = values.sum() / (totals.n_tokens - skipped)
        return MicrobatchLoss((weights * total).sum(), metrics)
