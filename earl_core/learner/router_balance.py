"""The loss that balances the experts of a mixture, over the tokens of an optimizer step.

For each routed layer E sum_i f_i P_i (Switch Transformer, arXiv 2101.03961, eq. 4 to 6), where f_i
is the share of the tokens that expert i was given, summed over the experts that a token is given,
and P_i the mean probability that the router gives it: k where tokens are divided evenly. Of the
layers the mean. transformers' `load_balancing_loss_func` is the same of one layer; of several it
multiplies means over all of them.

f of the whole step is known before its first pass, because the experts were recorded. Then the loss
is linear in the probabilities of single tokens: microbatches and ranks add up to it exactly. f of a
batch that is large suits mixtures better, too (arXiv 2501.11873).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.model import PackedTensors
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.pretrained.routers import Charge, Routers
from earl_core.tensors.collectives import Ranks
from earl_core.trajectory.routing import RoutingShape

_ROWS = 4096
"""Tokens that are counted at a time."""


@dataclass(frozen=True)
class RouterBalance:
    """The loss of one optimizer step, times its coefficient, as slopes of the probabilities.

    slopes: float32 [layers, experts]. Tokens that samples share count once for each of them; those
    without a record do not count.
    """

    coefficient: float
    unrecorded: int
    slopes: torch.Tensor

    @classmethod
    def of(
        cls,
        coefficient: float,
        routers: Routers,
        samples: Sequence[TrainingSample],
        mesh: UpdateMesh,
    ) -> RouterBalance:
        """Count the experts of the step's samples, of all ranks: of this one's a part, if others
        share their tokens. Collective."""
        shape = routers.shape
        loads = np.zeros((shape.layers, shape.experts), np.int64)
        rank, size = mesh.context_rank, mesh.deployment.context_parallel
        for sample in samples:
            if sample.routing is not None:
                first, stop = (len(sample.tokens) * part // size for part in (rank, rank + 1))
                for start in range(first, stop, _ROWS):
                    places = np.arange(start, min(start + _ROWS, stop))
                    loads += _counted(sample.routing.read(places), shape)
        every = Ranks(mesh).gather_json(loads.tolist())
        loads = np.sum([np.array(each) for each in every], axis=0)
        tokens = max(1, int(loads[0].sum()) // shape.chosen)
        slopes = coefficient * shape.experts / shape.layers * (loads / tokens) / tokens
        placed = torch.from_numpy(slopes.astype(np.float32)).to(mesh.device)
        return cls(coefficient, shape.unrecorded, placed)

    def charging(self, packed: PackedTensors) -> PackedTensors:
        """The microbatch with its part of the loss, if its tokens have a record."""
        if packed.routing is None or packed.copies is None:
            return packed
        known = (packed.routing != self.unrecorded).any(dim=1)
        return replace(packed, charge=Charge(self.slopes, packed.copies * known))


def _counted(routing: np.ndarray, shape: RoutingShape) -> np.ndarray:
    """How often each expert of each layer was chosen, int64 [layers, experts]."""
    known = routing[(routing != shape.unrecorded).any(axis=1)].astype(np.int64)
    places = known.reshape(-1, shape.layers, shape.chosen)
    places += np.arange(shape.layers)[:, None] * shape.experts
    counts = np.bincount(places.reshape(-1), minlength=shape.layers * shape.experts)
    return counts.reshape(shape.layers, shape.experts)
