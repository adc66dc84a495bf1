"""Entropy bonus: a reward for keeping options open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from earl_core.algorithms.registry import Registered

if TYPE_CHECKING:
    from torch import Tensor


class EntropyBonus(Registered):
    """Adds ``-coefficient * H_t`` to each token's loss.

    Attributes:
        coefficient: Loss per nat of entropy. With 0 the entropy need not carry a gradient.
    """

    coefficient: Annotated[float, Field(ge=0.0)] = 0.0

    @property
    def active(self) -> bool:
        """Whether the bonus does anything, so that entropy must be computed with a gradient."""
        return self.coefficient > 0.0

    def loss(self, entropy: Tensor) -> Tensor:
        """Loss of each token, float32 [T].

        Args:
            entropy: Entropy of the distribution each token was drawn from, in nats, [T].
        """
        return -self.coefficient * entropy.float()
