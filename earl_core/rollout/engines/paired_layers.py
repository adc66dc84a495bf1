"""Linear layers of a transformers model that add an adapter's pairs to their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import PreTrainedModel

from earl_core.weights.adapter_pairs import Pair


@dataclass(frozen=True)
class Pairs:
    """Pairs by the names of their matrices, and the factor of their products."""

    by_matrix: Mapping[str, Pair] = field(default_factory=dict)
    scale: float = 1.0


NO_PAIRS = Pairs()


class PairedLayers:
    """Every linear layer of a model but its head. `pairs`: those of the next forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.pairs = NO_PAIRS
        head = model.get_output_embeddings()
        layers = {
            f"{name}.weight": layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not head
        }
        self.matrices: dict[str, torch.Tensor] = {n: each.weight for n, each in layers.items()}
        for name, layer in layers.items():
            layer.register_forward_hook(partial(self._add, name))

    def _add(
        self, name: str, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """W x + alpha / rank * B A x: two thin products, no matrix is made."""
        pair = self.pairs.by_matrix.get(name)
        if pair is None:
            return output
        a, b = pair
        return output + F.linear(F.linear(inputs[0], a), b) * self.pairs.scale
