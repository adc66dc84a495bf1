"""Policy losses: per-token losses over the trained tokens of a packed microbatch.

A loss returns one number per token; how tokens are weighted into a scalar is the aggregation's
business (:mod:`earl_core.algorithms.aggregation`), so every loss combines with every aggregation.
Only tensor methods are used, so that reading a configuration imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from earl_core.algorithms.ratios import LOG_RATIO_BOUND, episode_mean
from earl_core.algorithms.registry import Registered, Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The T trained tokens of one microbatch, flat; float tensors [T] on one device.

    Attributes:
        logprobs: Log-probabilities under the policy being trained; carries the gradient.
        old_logprobs: Under the policy at the start of this update, by the trainer; no gradient.
        advantages: One for each token; no gradient.
        episode_index: int64 [T], the token's episode as a local number in ``[0, n_episodes)``.
        n_episodes: Episodes in this microbatch.
        importance_weights: Correction factor of each token's policy loss, no gradient; None for 1.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    episode_index: Tensor
    n_episodes: int
    importance_weights: Tensor | None = None

    def __post_init__(self) -> None:
        expected = self.logprobs.shape
        for name in ("old_logprobs", "advantages", "episode_index", "importance_weights"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.ndim != 1 or tensor.shape != expected):
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape)} but `logprobs` has "
                    f"{tuple(expected)}; all must be flat, with one entry for each trained token."
                )

    def log_ratio(self) -> Tensor:
        """log(policy / old policy) of each token, float32 [T], within +-``LOG_RATIO_BOUND``."""
        difference = self.logprobs.float() - self.old_logprobs.float()
        return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def weighted(self, loss: Tensor) -> Tensor:
        """``loss`` [T] times the importance weights, if there are any."""
        return loss if self.importance_weights is None else loss * self.importance_weights.float()


class PolicyLoss(Registered, ABC):
    """Interface of every policy loss.

    Attributes:
        zero_without_advantage: True when a token whose advantage is 0 has no loss and no gradient,
            and changes those of no other token but the ones of its episode.
    """

    zero_without_advantage: ClassVar[bool] = False

    @abstractmethod
    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token, float32 [T] with gradient, and diagnostics, each float32 [T] without.

        Diagnostics of every loss: ``ratio`` (policy / old policy), ``update_kl`` (k3 estimate of
        how far this update has moved the policy from the old one). Clipping losses add
        ``clip_fraction`` (1 where the clip took the gradient away).
        """


CLIPPED = ("clip_fraction", "dual_clip_fraction")
"""Diagnostics that are 0 where the advantage is."""


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    PolicyLoss,  # type: ignore[type-abstract]
)


def _diagnostics(inputs: LossInputs) -> dict[str, Tensor]:
    log_ratio = inputs.log_ratio().detach()
    return {"ratio": log_ratio.exp(), "update_kl": log_ratio.expm1() - log_ratio}


@POLICY_LOSSES.register("policy_gradient")
class PolicyGradient(PolicyLoss):
    """REINFORCE (Williams 1992): l_t = -A_t log pi_t.

    It ignores how far the policy has moved: right for the first optimizer step on a batch only.
    """

    zero_without_advantage = True

    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -inputs.advantages.float() * inputs.logprobs.float()
        return inputs.weighted(loss), _diagnostics(inputs)


class ClippedLoss(PolicyLoss, ABC):
    """Shared form -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""

    zero_without_advantage = True

    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)]
    clip_high: Annotated[float, Field(gt=0.0)]

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Per-token loss and, as 0 or 1, where the clipped branch is the one that counts."""
        free = -advantages * ratio
        bounded = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return free.maximum(bounded), (bounded > free).detach().float()


@POLICY_LOSSES.register("ppo_clip")
class PPOClip(ClippedLoss):
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7), asymmetric, optionally dual.

    ``clip_high > clip_low`` is DAPO's clip-higher (arXiv 2503.14476). The dual clip (arXiv
    1912.09729) bounds the loss of a token with A < 0 by ``-dual_clip * A``, which a large ratio
    would otherwise make arbitrarily large; such tokens then have no gradient.

    Attributes:
        clip_low: The ratio is clipped below at ``1 - clip_low``.
        clip_high: The ratio is clipped above at ``1 + clip_high``.
        dual_clip: Largest ratio that counts where A < 0, greater than 1; None for no bound.
    """

    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None

    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages = inputs.advantages.float()
        loss, clipped = self._clipped(inputs.log_ratio().exp(), advantages)
        diagnostics = _diagnostics(inputs)
        if self.dual_clip is not None:
            ceiling = -advantages * self.dual_clip
            hit = (advantages < 0) & (loss > ceiling)
            loss = ceiling.where(hit, loss)
            diagnostics["dual_clip_fraction"] = hit.detach().float()
        diagnostics["clip_fraction"] = clipped
        return inputs.weighted(loss), diagnostics


@POLICY_LOSSES.register("gspo")
class GSPO(ClippedLoss):
    """GSPO (arXiv 2507.18071): ratio and clip of the whole episode, its tokens in or out together.

    The ratio is the paper's equation 7, ``s = exp(mean_t(log pi_t - log pi_old_t))``, the mean
    over all trained tokens of the episode. The token form (GSPO-token) is used: ``s_t = sg[s] *
    pi_t / sg[pi_t]``, which has the value of ``s``, and for one advantage per episode and
    ``sequence_mean_token_mean`` also the gradient of the sequence form (equation 5); it stays
    right where tokens of an episode differ in advantage. The default clips are the paper's.

    All trained tokens of an episode must be in one microbatch; packing keeps an episode whole for
    this.

    Attributes:
        clip_low: The ratio is clipped below at ``1 - clip_low``; much smaller than PPO's, as s is
            a mean.
        clip_high: The ratio is clipped above at ``1 + clip_high``.
    """

    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 3e-4
    clip_high: Annotated[float, Field(gt=0.0)] = 4e-4

    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = inputs.logprobs.float()
        current = logprobs.detach()
        difference = current - inputs.old_logprobs.float()
        mean = episode_mean(difference, inputs.episode_index, inputs.n_episodes)
        bounded = mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[inputs.episode_index]
        # exp(0) times the detached ratio: the value of s exactly, the gradient of log pi_t.
        ratio = bounded.exp() * (logprobs - current).exp()
        loss, clipped = self._clipped(ratio, inputs.advantages.float())
        diagnostics = _diagnostics(inputs)
        diagnostics["sequence_ratio"] = ratio.detach()
        diagnostics["clip_fraction"] = clipped
        return inputs.weighted(loss), diagnostics
