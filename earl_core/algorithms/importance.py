"""Correction for the engine that sampled not being numerically the trainer that learns.

An engine and a trainer with equal weights still differ by kernels and precision, so tokens were
sampled from a slightly different policy than the trainer's log-probabilities say. Truncated
importance sampling (Ionides 2008; for engine and trainer: Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training", 2025) weighs each token by min(trainer /
engine, cap). It corrects in the same way for episodes that an older policy has sampled
(`schedule.staleness`): with `ppo_clip` this is decoupled PPO (Hilton et al., arXiv 2110.00641).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from earl_core.algorithms.ratios import LOG_RATIO_BOUND, episode_sum
from earl_core.algorithms.registry import Registered

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]


class ImportanceCorrection(Registered):
    """Weights w = exp(old_logprobs - rollout_logprobs), bounded.

    Attributes:
        cap: Largest weight. Truncation trades a little bias for a bounded variance.
        low: Smallest weight.
        outside: ``cut``: a weight outside of [low, cap] becomes the nearer bound (truncated
            importance sampling). ``mask``: it becomes 0, which leaves the token out (IcePop, the
            Ling team, 2025; "masked importance sampling").
        level: ``token``: each token by its own ratio. ``sequence``: all tokens of an episode by
            the ratio of the whole episode, the product over its trained tokens; unbiased up to
            the cap for episode-level returns, but the product of many small differences varies
            widely. ``geometric``: all tokens of an episode by the geometric mean of its ratios
            (as in GSPO, arXiv 2507.18071), which says whether the episode as a whole is off.
    """

    cap: Annotated[float, Field(gt=0.0)] = 2.0
    low: Annotated[float, Field(ge=0.0)] = 0.0
    outside: Literal["cut", "mask"] = "cut"
    level: Literal["token", "geometric", "sequence"] = "token"

    @property
    def token_wise(self) -> bool:
        """True when the weight of a token depends on that token alone."""
        return self.level == "token"

    def weights(
        self, old_logprobs: Tensor, rollout_logprobs: Tensor, episode_index: Tensor, n_episodes: int
    ) -> Tensor:
        """Weights float32 [T] without gradient, for ``LossInputs.importance_weights``.

        Args:
            old_logprobs: By the trainer before its first step, float [T].
            rollout_logprobs: By the engine, of the distribution sampled from, float [T].
            episode_index: int64 [T] in ``[0, n_episodes)``.
            n_episodes: Episodes here. Unless the level is ``token`` an episode must be here whole.
        """
        difference = old_logprobs.detach().float() - rollout_logprobs.detach().float()
        if self.level != "token":
            total = episode_sum(difference, episode_index, n_episodes)
            if self.level == "geometric":
                ones = difference.new_ones(difference.shape)
                total = total / episode_sum(ones, episode_index, n_episodes).clamp(min=1.0)
            difference = total[episode_index]
        weights = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if self.outside == "mask":
            return weights * ((weights >= self.low) & (weights <= self.cap))
        return weights.clamp(self.low, self.cap)


def weight_metrics(weights: Array, episodes: Array) -> dict[str, float]:
    """Measure the weights of an update.

    Args:
        weights: Of all trained tokens, float [T].
        episodes: Mean weight of each episode's trained tokens, float [E].

    Returns:
        ``importance_weight_mean``, ``importance_masked_share``, the share of tokens of weight 0,
        and effective sample sizes (sum w)^2 / sum w^2 (Kong 1992) over their number:
        ``importance_sample_share`` of the tokens, ``importance_episode_share`` of the episodes.
        Nothing without tokens.
    """
    if not weights.size:
        return {}
    return {
        "importance_weight_mean": float(weights.mean()),
        "importance_masked_share": float((weights == 0.0).mean()),
        "importance_sample_share": _effective_share(weights),
        "importance_episode_share": _effective_share(episodes),
    }


def _effective_share(weights: Array) -> float:
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / (squares * weights.size) if squares else 0.0


def too_small(metrics: Mapping[str, float], least: float) -> str:
    """A sentence when the effective sample size of an update, by tokens or by episodes, is below
    this share of their number; empty: it is not, or nothing was weighed."""
    found = {
        what: metrics.get(f"importance_{name}_share", 1.0)
        for name, what in (("sample", "tokens"), ("episode", "episodes"))
    }
    if min(found.values()) >= least:
        return ""
    shares = " and ".join(f"{share:.1%} of the {what}" for what, share in found.items())
    return (
        f"the importance weights leave an effective sample size of {shares}, and "
        f"update.least_sample_size is {least:.1%}: the policy has moved far from the one that "
        "sampled; lower schedule.staleness or update.learning_rate, or bound the ratios more "
        "narrowly (algorithm.importance_correction: cap, low, outside)"
    )


def mismatch_metrics(old_logprobs: Any, rollout_logprobs: Any, positions: Any) -> dict[str, float]:
    """Measure the difference between engine and trainer, over all T trained tokens given.

    Args:
        old_logprobs: By the trainer, NumPy array or tensor [T].
        rollout_logprobs: By the engine, likewise.
        positions: Of the tokens in their samples, likewise.

    Returns:
        ``mismatch_mean``, ``mismatch_p95``, ``mismatch_max`` of |trainer - engine| in nats,
        ``mismatch_kl``, the k3 estimate of KL(engine || trainer), and ``mismatch_growth``, the mean
        over the later half of the positions relative to that over the earlier one. Nothing without
        tokens. A percentile cannot be merged from parts: give the tokens of the whole batch.
    """
    difference = _float64(old_logprobs) - _float64(rollout_logprobs)
    if difference.size == 0:
        return {}
    size = np.abs(difference)
    bounded = difference.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    late = _float64(positions) > np.median(_float64(positions))
    early_mean = float(size[~late].mean())
    late_mean = float(size[late].mean()) if late.any() else early_mean
    return {
        "mismatch_growth": late_mean / max(early_mean, 1e-9) if late_mean else 1.0,
        "mismatch_mean": float(size.mean()),
        "mismatch_p95": float(np.percentile(size, 95)),
        "mismatch_max": float(size.max()),
        "mismatch_kl": float((np.expm1(bounded) - bounded).mean()),
    }


def _float64(values: Any) -> Array:
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
