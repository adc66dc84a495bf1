"""The most likely tokens after chosen positions, by the head's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from earl_core.learner.token_logprobs import multiply

if TYPE_CHECKING:
    from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard


@torch.no_grad()
def likeliest(
    head: nn.Module,
    states: torch.Tensor,
    predictors: torch.Tensor,
    vocabulary: VocabularyShard | None = None,
    *,
    float32: bool = False,
) -> torch.Tensor:
    """The likeliest token, the first of equal ones, after these rows of the states; int64 [T'].

    head, states, predictors, float32: see `HeadScore`. vocabulary: this rank's part where the head
    is split over ranks; the result is that of the whole head. All T' rows of logits exist at a
    time, so it is meant for few. Collective where the vocabulary is split.
    """
    weight = cast(torch.Tensor, head.weight)
    bias = cast("torch.Tensor | None", getattr(head, "bias", None))
    if vocabulary is not None:
        weight = vocabulary.local(weight)
        bias = None if bias is None else vocabulary.local(bias)
    weight = weight.float() if float32 else weight
    logits = states.new_empty(len(predictors), len(weight), dtype=torch.float32)
    multiply(states[predictors].to(weight.dtype), weight.t(), logits)
    if bias is not None:
        logits += bias
    if vocabulary is None:
        return logits.argmax(-1)
    # A rank without rows of the head has none to offer.
    top = logits.new_full((len(predictors),), -torch.inf)
    negated = predictors.new_full((len(predictors),), torch.iinfo(torch.int64).min)
    if vocabulary.rows:
        top, place = logits.max(-1)
        negated = -(place + vocabulary.start)
    largest = top.clone()
    vocabulary.largest(largest)
    negated = negated.masked_fill(top < largest, torch.iinfo(torch.int64).min)
    vocabulary.largest(negated)
    return -negated
