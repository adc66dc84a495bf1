"""Correction for the engine that sampled not being numerically the trainer that learns.

An engine and a trainer with equal weights still differ by kernels and precision, so tokens were
sampled from a slightly different policy than the trainer's log-probabilities say. Truncated
importance sampling (Ionides 2008; for engine and trainer: Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training", 2025) weighs each token by min(trainer /
engine, cap).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from earl_core.algorithms.ratios import LOG_RATIO_BOUND, episode_sum
from earl_core.algorithms.registry import Registered

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceCorrection(Registered):
    """Weights w = min(exp(old_logprobs - rollout_logprobs), cap).

    Attributes:
        cap: Largest weight. Truncation trades a little bias for a bounded variance.
        level: ``token``: each token by its own ratio. ``sequence``: all tokens of an episode by
            the ratio of the whole episode, the product over its trained tokens; unbiased up to
            the cap for episode-level returns, but the product of many small differences varies
            widely.
    """

    cap: Annotated[float, Field(gt=0.0)] = 2.0
    level: Literal["token", "sequence"] = "token"

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
            n_episodes: Episodes here. For ``sequence`` an episode must be here whole.
        """
        difference = old_logprobs.detach().float() - rollout_logprobs.detach().float()
        if self.level == "sequence":
            difference = episode_sum(difference, episode_index, n_episodes)[episode_index]
        return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=self.cap)


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


def _float64(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
