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
            Those of the engine where ``importance_correction.anchor`` is ``rollout``.
        advantages: One for each token; no gradient.
        episode_index: int64 [T], the token's episode as a local number in ``[0, n_episodes)``.
        n_episodes: Episodes in this microbatch. Where conversations have roles, a role's part of an
            episode stands for one, here and in every loss.
        importance_weights: Correction factor of each token's policy loss, no gradient; None for 1.
        rollout_logprobs: By the engine, of the distribution sampled from; no gradient. An update
            always has them.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    episode_index: Tensor
    n_episodes: int
    importance_weights: Tensor | None = None
    rollout_logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        expected = self.logprobs.shape
        for name in (
            *("old_logprobs", "advantages", "episode_index"),
            *("importance_weights", "rollout_logprobs"),
        ):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.ndim != 1 or tensor.shape != expected):
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape)} but `logprobs` has "
                    f"{tuple(expected)}; all must be flat, with one entry for each trained token."
                )

    def log_ratio(self) -> Tensor:
        """log(policy / old policy) of each token, float32 [T], within +-``LOG_RATIO_BOUND``."""
        return _log_ratio(self.logprobs, self.old_logprobs)

    def weighted(self, loss: Tensor) -> Tensor:
        """``loss`` [T] times the importance weights, if there are any."""
        return loss if self.importance_weights is None else loss * self.importance_weights.float()


def _log_ratio(logprobs: Tensor, behind: Tensor) -> Tensor:
    return (logprobs.float() - behind.float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


class PolicyLoss(Registered, ABC):
    """Interface of every policy loss.

    Attributes:
        zero_without_advantage: True when a token whose advantage is 0 has no loss, no gradient and
            a ``clip_fraction`` of 0, and changes those of no other token, save its episode's.
    """

    zero_without_advantage: ClassVar[bool] = False

    token_wise: ClassVar[bool] = False
    """True: the loss of a token depends on that token's inputs alone, so the samples of an episode
    may be in several microbatches and on several ranks. False keeps each episode whole."""

    from_rollout: ClassVar[bool] = False
    """True: its ratios are to ``rollout_logprobs``. They correct for the engine already, so such a
    loss is refused with an importance correction."""

    to_old: ClassVar[bool] = True
    """False: its gradient does not depend on ``old_logprobs``."""

    @abstractmethod
    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token, float32 [T] with gradient, and diagnostics, each float32 [T] without.

        Diagnostics of every loss: ``ratio`` (policy / old policy), ``update_kl`` (k3 estimate of
        how far this update has moved the policy from the old one). Losses with a bound add
        ``clip_fraction`` (1 where it acts).
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

    token_wise = True
    zero_without_advantage = True
    to_old = False

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

    token_wise = True

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

    All trained tokens of an episode must be in one microbatch (``token_wise``). With
    ``sequence_mean_token_sum`` this is LUSPO (arXiv 2602.05261).

    Attributes:
        clip_low: The ratio is clipped below at ``1 - clip_low``; much smaller than PPO's, as s is
            a mean.
        clip_high: The ratio is clipped above at ``1 + clip_high``.
    """

    token_wise = False

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


@POLICY_LOSSES.register("cispo")
class CISPO(PolicyLoss):
    """CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): l_t = -sg[min(r_t, 1 + clip_high)]
    A_t log pi_t, with r_t = pi_t / pi_old_t and sg for "no gradient".

    The bound is on the weight of a token, not on its part in the loss: no token loses its gradient,
    not even rare ones whose ratio has grown much. As in the paper there is no lower bound, which
    would raise the weights of tokens that the policy has left. The default is the bound of 5 of
    ScaleRL (arXiv 2510.13786), whose results were alike for 4, 5 and 8. Nothing stops the policy
    from moving on in a direction: keep the steps on a batch few.

    Attributes:
        clip_high: The weight of a token is at most ``1 + clip_high``.
    """

    token_wise = True
    zero_without_advantage = True

    clip_high: Annotated[float, Field(gt=0.0)] = 4.0

    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        diagnostics = _diagnostics(inputs)
        ratio, most = diagnostics["ratio"], 1.0 + self.clip_high
        loss = -ratio.clamp(max=most) * inputs.advantages.float() * inputs.logprobs.float()
        diagnostics["clip_fraction"] = ((ratio > most) & (inputs.advantages != 0)).float()
        return inputs.weighted(loss), diagnostics


@POLICY_LOSSES.register("dppo")
class DPPO(PolicyLoss):
    """DPPO with the binary total variation (arXiv 2602.04879, equation 13): l_t = -m_t r_t A_t,
    where r_t = pi_t / mu_t and mu is the engine's policy that sampled the token.

    The mask m_t is 0 where pi_t - mu_t > mask_high and A_t > 0, or mu_t - pi_t > mask_low and
    A_t < 0, else 1: a token is left out when its probability, not its ratio, has gone too far in
    the direction that its advantage pushes it. A clip of the ratio by 0.2 stops a rare token early
    (0.001 at 0.0012), a frequent one late (0.9 at 0.72). Masks and ratios are to the engine's
    log-probs (section 5.2), so they bound the difference between engine and trainer too, and act in
    the first step already. The thresholds are prime-rl's and SkyRL's defaults; verl's script for
    this loss has 0.15.

    Attributes:
        mask_low: Largest loss of probability of a token with A < 0.
        mask_high: Largest gain of probability of a token with A > 0.
    """

    token_wise = True
    zero_without_advantage = True
    from_rollout = True

    mask_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    mask_high: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2

    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if inputs.rollout_logprobs is None:
            raise ValueError("The loss dppo needs `rollout_logprobs`, the engine's of each token.")
        advantages = inputs.advantages.float()
        rollout = inputs.rollout_logprobs.float()
        gained = inputs.logprobs.detach().float().exp() - rollout.exp()
        masked = ((advantages > 0) & (gained > self.mask_high)) | (
            (advantages < 0) & (-gained > self.mask_low)
        )
        loss = -advantages * _log_ratio(inputs.logprobs, rollout).exp()
        diagnostics = _diagnostics(inputs)
        diagnostics["clip_fraction"] = masked.float()
        return inputs.weighted(loss.masked_fill(masked, 0.0)), diagnostics


@POLICY_LOSSES.register("sapo")
class SAPO(PolicyLoss):
    """SAPO (arXiv 2511.20347): l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with r_t = pi_t /
    pi_old_t and tau by the sign of A_t.

    A soft clip: the gradient is that of -r_t A_t times ``sech^2(tau (r_t - 1) / 2)``, which is 1
    at r_t = 1 and falls on both sides. The larger ``tau_negative`` damps tokens with A <= 0 sooner,
    whose gradient raises all other tokens of the vocabulary. The defaults are the paper's, whose
    aggregation is ``sequence_mean_token_mean``.

    Attributes:
        tau_positive: Steepness of the gate where A > 0, for each unit of the ratio.
        tau_negative: Steepness of the gate where A <= 0.
    """

    token_wise = True
    zero_without_advantage = True

    tau_positive: Annotated[float, Field(gt=0.0)] = 1.0
    tau_negative: Annotated[float, Field(gt=0.0)] = 1.05

    def per_token(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages = inputs.advantages.float()
        tau = advantages.new_full(advantages.shape, self.tau_negative)
        tau = tau.masked_fill(advantages > 0, self.tau_positive)
        gate = (tau * (inputs.log_ratio().exp() - 1.0)).sigmoid()
        diagnostics = _diagnostics(inputs)
        diagnostics["gate"] = (4.0 * gate * (1.0 - gate)).detach()
        return inputs.weighted(-4.0 / tau * gate * advantages), diagnostics
