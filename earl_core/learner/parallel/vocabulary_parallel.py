"""Embedding and output layer split over the vocabulary: each tensor rank holds some of the rows.

Masked look-up as in Megatron-LM (arXiv 1909.08053). The whole logits exist nowhere: what the ranks
exchange of them is in `token_logprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from earl_core.learner.parallel.cuts import own_part


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """The rows [start, start + rows) of the vocabulary, and the ranks that hold the others. rows
    may be 0: the parts are those of `torch.chunk`, of `most` rows but the last ones."""

    start: int
    rows: int
    most: int
    group: dist.ProcessGroup

    def embed(self, embedding: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids [...] → this rank's summand of [..., hidden], zeros for others' rows."""
        weight = own_part(embedding.weight)
        place, inside = self.places(ids)
        if self.rows:
            padding = embedding.padding_idx
            here = padding is not None and 0 <= padding - self.start < self.rows
            # The row of the padding token gets no gradient from look-ups, as in the whole model.
            row = padding - self.start if padding is not None and here else None
            return F.embedding(place, weight, row) * inside[..., None]
        return weight.sum(0).expand(*ids.shape, -1)

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the head, with the way back of their gradient."""
        return own_part(parameter)

    def largest(self, values: torch.Tensor) -> None:
        """Make the ranks' values their largest, in place. Collective."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def sum(self, values: torch.Tensor) -> None:
        """Make the ranks' values their sum, in place. Collective."""
        dist.all_reduce(values, group=self.group)

    def places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each id's place among this rank's rows (0 for a row of another rank's), and
        whether it is one of them."""
        place = ids - self.start
        inside = (place >= 0) & (place < self.rows)
        return place.masked_fill(~inside, 0), inside
