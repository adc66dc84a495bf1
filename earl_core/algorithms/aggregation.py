"""Weights that make one loss of per-token losses, with denominators of the whole minibatch.

An aggregation is a weight for each token, so that ``loss = sum_t w_t * l_t``. The weights depend
on totals of the minibatch over all microbatches and ranks, never on how it was split: summing the
gradients of the parts gives the gradient of the whole. A trainer whose data-parallel ranks
average gradients instead of summing them must multiply its loss by their number.

"Sequence" counts episodes: all samples of an episode together are one sequence. Episodes without
a trained token are not counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from earl_core.algorithms.registry import Registered, Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of a whole minibatch over all ranks: trained tokens, and episodes that have any.

    n_skipped: tokens among them that nobody computes, because they add nothing to the gradient.
    """

    n_tokens: int
    n_episodes: int
    n_skipped: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.n_episodes <= self.n_tokens:
            raise ValueError(
                f"A minibatch of {self.n_tokens} trained tokens in {self.n_episodes} episodes "
                "cannot be aggregated; skip empty minibatches and count only episodes with "
                "trained tokens."
            )

    @classmethod
    def from_token_counts(cls, token_counts: Iterable[int], n_skipped: int = 0) -> Totals:
        """Totals of episodes with these numbers of trained tokens."""
        positive = [int(count) for count in token_counts if count > 0]
        return cls(sum(positive), len(positive), n_skipped)


class Aggregation(Registered, ABC):
    """Interface of every aggregation."""

    def weights(self, token_counts: Tensor, episode_index: Tensor, totals: Totals) -> Tensor:
        """Weight of each token, float32 [T].

        Args:
            token_counts: Trained tokens of each local episode in the whole minibatch, int64 [E];
                not only those in this microbatch.
            episode_index: Local episode of each token here, int64 [T] in ``[0, E)``.
            totals: Sizes of the whole minibatch.
        """
        return self.per_episode(token_counts.double(), totals)[episode_index].float()

    @abstractmethod
    def per_episode(self, token_counts: Tensor, totals: Totals) -> Tensor:
        """Weight of a token of each episode, float64 [E]; ``token_counts`` is float64 here."""


AGGREGATIONS: Registry[Aggregation] = Registry(
    "aggregation",
    Aggregation,  # type: ignore[type-abstract]
)


@AGGREGATIONS.register("token_mean")
class TokenMean(Aggregation):
    """Mean over all trained tokens (DAPO, arXiv 2503.14476): w = 1 / n_tokens."""

    def per_episode(self, token_counts: Tensor, totals: Totals) -> Tensor:
        return token_counts.new_full(token_counts.shape, 1.0 / totals.n_tokens)


@AGGREGATIONS.register("sequence_mean_token_mean")
class SequenceMeanTokenMean(Aggregation):
    """Mean over episodes of the mean over their n_e tokens: w = 1 / (n_episodes * n_e).

    GRPO's (arXiv 2402.03300) and GSPO's (arXiv 2507.18071).
    """

    def per_episode(self, token_counts: Tensor, totals: Totals) -> Tensor:
        return 1.0 / (totals.n_episodes * token_counts.clamp(min=1.0))


@AGGREGATIONS.register("sequence_mean_token_sum")
class SequenceMeanTokenSum(Aggregation):
    """Mean over episodes of the sum over their tokens: w = 1 / n_episodes.

    The plain policy gradient of an episode's return.
    """

    def per_episode(self, token_counts: Tensor, totals: Totals) -> Tensor:
        return token_counts.new_full(token_counts.shape, 1.0 / totals.n_episodes)


@AGGREGATIONS.register("constant")
class Constant(Aggregation):
    """Dr. GRPO (arXiv 2503.20783): w = 1 / (n_episodes * length), whatever an episode's length.

    Attributes:
        length: A constant number of tokens, usually the budget of trained tokens of an episode.
            It only scales the learning rate, but must stay the same for a whole run.
    """

    length: Annotated[int, Field(gt=0)]

    def per_episode(self, token_counts: Tensor, totals: Totals) -> Tensor:
        return token_counts.new_full(token_counts.shape, 1.0 / (totals.n_episodes * self.length))
