"""Embedding and output layer split over the vocabulary: each tensor rank holds some of the rows.

The whole logits exist nowhere. What the ranks exchange for each position are its largest logit,
its sum of exponentials, its target's logit and, for entropies, one more sum: floats [T'], not
[T', vocabulary]. Masked look-up and split cross-entropy as in Megatron-LM (arXiv 1909.08053),
here with entropies and their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from earl_core.learner.head import EntropyMode
    from earl_core.pretrained.float32_head import Float32Head


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """The rows [start, start + rows) of the vocabulary, and the ranks that hold the others.

    rows may be 0: the parts are those of `torch.chunk`, of `most` rows but the last ones.
    """

    start: int
    rows: int
    most: int
    group: dist.ProcessGroup

    def embed(self, embedding: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids [...] → [..., hidden], equal on all ranks."""
        weight = _local(embedding.weight)
        place, inside = self._places(ids)
        if self.rows:
            padding = embedding.padding_idx
            here = padding is not None and 0 <= padding - self.start < self.rows
            # The row of the padding token gets no gradient from look-ups, as in the whole model.
            row = padding - self.start if padding is not None and here else None
            found = F.embedding(place, weight, row) * inside[..., None]
        else:
            found = weight.sum(0).expand(*ids.shape, -1)
        return _sum(found, self.group)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """The identity; what the ranks' logits send back to the hidden states is summed."""
        return _enter(hidden, self.group)

    def score(
        self,
        head: nn.Module | Float32Head,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy: EntropyMode,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies [n] of the targets [n], from hidden states [n, hidden] that
        `enter` gave. Collective; all ranks get the same.
        """
        weight: Any = head.weight
        bias: Any = getattr(head, "bias", None)
        logits = F.linear(hidden, _local(weight), None if bias is None else _local(bias)).float()
        if temperature != 1.0:
            logits = logits / temperature
        logprobs, entropies = _Logprobs.apply(logits, targets, self, entropy)  # type: ignore[no-untyped-call]
        return logprobs, None if entropy == "none" else entropies

    def _places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each id is among this rank's rows (a row of another rank's: 0), and whether."""
        place = ids - self.start
        inside = (place >= 0) & (place < self.rows)
        return place.masked_fill(~inside, 0), inside


def _local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's rows, with the way back of their gradient."""
    return cast(DTensor, weight).to_local()


def _sum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed: torch.Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return summed


def _enter(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    entered: torch.Tensor = _Enter.apply(values, group)  # type: ignore[no-untyped-call]
    return entered


class _Sum(torch.autograd.Function):
    """The sum over the ranks, which all go on alike from it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Enter(torch.autograd.Function):
    """The identity on values that all ranks have; each rank goes its own way from it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Logprobs(torch.autograd.Function):
    """log p(target) and entropy of softmax(logits), logits [n, vocabulary] split by column."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabularyShard,
        mode: EntropyMode,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nothing = logits.new_full(logits.shape[:1], -torch.inf)
        top = logits.amax(-1) if shard.rows else nothing
        dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)
        shifted = logits - top[:, None]
        place, inside = shard._places(targets)
        if shard.rows:
            chosen = shifted.gather(1, place[:, None])[:, 0] * inside
        else:
            chosen = torch.zeros_like(top)
        parts = shifted.exp()
        sums = [chosen, parts.sum(-1)]
        if mode != "none":
            sums.append((parts * shifted).sum(-1))
        exchanged = torch.stack(sums)
        dist.all_reduce(exchanged, group=shard.group)
        total = exchanged[1]
        log_total = total.log()
        logprobs = exchanged[0] - log_total
        entropies = logprobs if mode == "none" else log_total - exchanged[2] / total
        ctx.differentiable = mode == "differentiable"
        if not ctx.differentiable:
            entropies = entropies.clone()
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(parts.div_(total[:, None]), place, inside, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, place, inside, entropies = ctx.saved_tensors
        towards = gradients[0]
        result = probabilities * -towards[:, None]
        if result.shape[1]:
            result.scatter_add_(1, place[:, None], (towards * inside)[:, None])
        if ctx.differentiable:
            # dH/dlogit = -p (log p + H)
            slope = torch.xlogy(probabilities, probabilities)
            slope.addcmul_(probabilities, entropies[:, None])
            result.addcmul_(slope, gradients[1][:, None], value=-1)
        return result, None, None, None
