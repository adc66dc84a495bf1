"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens.

With d = log pi - log ref of a token sampled from pi (J. Schulman, "Approximating KL Divergence",
2020): k1 = d (unbiased, high variance, may be negative), k2 = d^2 / 2 (biased, low variance),
k3 = exp(-d) - 1 + d (unbiased, never negative; here bounded, which biases it where that acts).

In the reward an estimate is a number: :meth:`KLEstimator.values`, on NumPy arrays and tensors
alike, and the policy gradient of that reward is the gradient of KL(pi || ref) for k1 alone: the
value of another estimator depends on pi itself. In the loss its gradient counts:
:meth:`KLEstimator.loss`. The two questions have different
answers: an unbiased value need not have an unbiased gradient, because the gradient ignores that
the tokens were sampled from pi. The gradient of k1 as it stands is that of log pi, whose
expectation is zero: it would be pure noise. The gradient of k2, d * grad log pi, is the gradient
of KL(pi || ref) on tokens sampled from pi.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from earl_core.algorithms.ratios import LOG_RATIO_BOUND
from earl_core.algorithms.registry import Registered, Registry

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Array = TypeVar("Array", NDArray[np.floating[Any]], Tensor)


K3_BOUND = 10.0


def _expm1(values: Array) -> Array:
    # Not exp() - 1: for the small differences of a healthy run float32 would lose every digit.
    result: Array = np.expm1(values) if isinstance(values, np.ndarray) else values.expm1()
    return result


class KLEstimator(Registered, ABC):
    """Interface of every KL estimator; inputs and outputs are [T], one for each trained token."""

    @abstractmethod
    def values(self, logprobs: Array, reference_logprobs: Array) -> Array:
        """The estimate of each token in nats, in the inputs' kind of array and dtype."""

    def loss(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """The estimate of each token as a term of the loss, differentiable in ``logprobs``."""
        return self.values(logprobs, reference_logprobs)

    def bounded(self, logprobs: Array, reference_logprobs: Array) -> Array | None:
        """1 for each token whose estimate was cut to the estimator's bound, else 0; None for an
        estimator without one.
        """
        return None


KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "KL estimator",
    KLEstimator,  # type: ignore[type-abstract]
)


@KL_ESTIMATORS.register("k1")
class K1(KLEstimator):
    """d. In the loss the value of k1 with the gradient of k2: its own has expectation zero."""

    def values(self, logprobs: Array, reference_logprobs: Array) -> Array:
        return logprobs - reference_logprobs

    def loss(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        difference = logprobs - reference_logprobs
        square = 0.5 * difference * difference
        return difference.detach() + square - square.detach()


@KL_ESTIMATORS.register("k2")
class K2(KLEstimator):
    """d^2 / 2. Its gradient is the unbiased one for tokens sampled from the policy."""

    def values(self, logprobs: Array, reference_logprobs: Array) -> Array:
        difference = logprobs - reference_logprobs
        return 0.5 * difference * difference


@KL_ESTIMATORS.register("k3")
class K3(KLEstimator):
    """exp(-d) - 1 + d, GRPO's term (arXiv 2402.03300, equation 4).

    Its gradient is that of the other direction, KL(ref || pi): (1 - ref/pi) * grad log pi. It is
    kept, as published. The estimate of a token is at most 10 nats, as in verl: without a bound
    the gradient of a token 12 nats below the reference is e^12 = 160,000 times that of a token at
    k1 = 1, and the update is that token's. Beyond it (d below -2.6 or
    above 11) the gradient is zero. d is bounded to +-20 against overflow.
    """

    def values(self, logprobs: Array, reference_logprobs: Array) -> Array:
        return self._unbounded(logprobs, reference_logprobs).clip(None, K3_BOUND)

    def bounded(self, logprobs: Array, reference_logprobs: Array) -> Array:
        estimate = self._unbounded(logprobs, reference_logprobs)
        cut: Array = (estimate > K3_BOUND) * (estimate * 0 + 1)
        return cut

    def _unbounded(self, logprobs: Array, reference_logprobs: Array) -> Array:
        difference = (logprobs - reference_logprobs).clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        estimate: Array = _expm1(-difference) + difference
        return estimate
