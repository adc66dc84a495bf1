"""Low-rank pairs beside a model's frozen matrices (LoRA, arXiv 2106.09685).

A matrix W [out, in] with a pair computes as W + alpha / rank * B A. A [rank, in] and B [out, rank]
are parameters of the matrix's own module, `lora_A` and `lora_B`, so that whatever cuts, gathers,
compiles or moves a layer takes them along, and no name of the base changes. The base does not
require gradients. A begins random and B as 0, which is the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from earl_core.config.model import AdapterConfig
from earl_core.learner.layer_probe import decoder_layers
from earl_core.pretrained.adapter_checks import chosen_matrices
from earl_core.pretrained.adapter_directory import pair_names
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import derive_seed
from earl_core.weights.adapter import open_pairs
from earl_core.weights.manifest import AdapterEntry

if TYPE_CHECKING:
    from earl_core.pretrained.huggingface import PreTrainedModel

_SIDES = ("lora_A", "lora_B")


class PairedLinear(nn.Linear):
    """A matrix that may have a pair. `pair_on`: whether it has one that takes part; `pair_scale`:
    factor of the pair's product."""

    pair_on = False
    pair_scale = 0.0
    lora_A: torch.Tensor  # noqa: N815  (PEFT names it so)
    lora_B: torch.Tensor  # noqa: N815

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.with_pair(input, F.linear(input, self.weight, self.bias))

    def with_pair(self, input: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """`found`, the matrix's own product, and the pair's; plain tensors as `own_parts` gives."""
        if not self.pair_on:
            return found
        first, second = self.own_parts()
        return found + F.linear(F.linear(input, first) * self.pair_scale, second)

    def own_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B, or the parts of them that this rank computes with."""
        return self.lora_A, self.lora_B


def entry_of(adapter: AdapterConfig, model: PreTrainedModel, base_digest: str) -> AdapterEntry:
    """Describe the adapter of a model. Raises `ConfigError` for one that it cannot have."""
    _, targets = chosen_matrices(adapter, _shapes(model))
    return AdapterEntry(
        rank=adapter.rank, alpha=adapter.alpha, targets=tuple(targets), base_digest=base_digest
    )


def attach_pairs(model: PreTrainedModel, entry: AdapterEntry, base: torch.dtype) -> None:
    """Freeze a model on the meta device, in the dtype `base`, and give it float32 pairs in place.
    Raises `ConfigError` for a matrix that is no plain linear layer."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(base)
    wanted = AdapterConfig(rank=entry.rank, alpha=entry.alpha, targets=list(entry.targets))
    names, _ = chosen_matrices(wanted, _shapes(model))
    for name in names:
        path = name.removesuffix(".weight")
        matrix = model.get_submodule(path)
        if type(matrix) is not nn.Linear:
            raise ConfigError(
                f"model.adapter: {path} is no linear layer ({type(matrix).__name__}), and gets no "
                "pair: name other model.adapter.targets"
            )
        matrix.__class__ = PairedLinear
        paired = cast(PairedLinear, matrix)
        outputs, inputs = paired.weight.shape
        for side, shape in zip(_SIDES, ((entry.rank, inputs), (outputs, entry.rank)), strict=True):
            empty = torch.empty(shape, dtype=torch.float32, device="meta")
            paired.register_parameter(side, nn.Parameter(empty))
        paired.pair_on, paired.pair_scale = True, entry.scale


def first_pairs(
    model: PreTrainedModel, adapter: AdapterConfig, entry: AdapterEntry, seed: int
) -> dict[str, torch.Tensor]:
    """The whole pairs that training begins with, on the host in float32, by parameter name.

    model: with pairs, not cut. Those of the adapter's directory, or A uniform within
    1 / sqrt(inputs), as PEFT draws it, by seed and name alone, and B 0. Raises `ConfigError` for a
    directory with other pairs, or of another base.
    """
    empty = pairs_of(model)
    if adapter.source is None:
        return {name: _drawn(name, tensor.shape, seed) for name, tensor in empty.items()}
    shapes = {peft_name(name): tuple(tensor.shape) for name, tensor in empty.items()}
    stored = open_pairs(Path(adapter.source), shapes, entry.base_digest)
    return {name: stored[peft_name(name)].float() for name in empty}


def pairs_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all pairs by name; empty for a model without."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] in _SIDES
    }


def peft_name(parameter: str) -> str:
    """PEFT's name of a parameter of a pair."""
    matrix, _, side = parameter.rpartition(".")
    return pair_names(f"{matrix}.weight")[_SIDES.index(side)]


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen matrices alone for a while: the model before training."""
    paired = [each for each in model.modules() if isinstance(each, PairedLinear) and each.pair_on]
    try:
        for each in paired:
            each.pair_on = False
        yield
    finally:
        for each in paired:
            each.pair_on = True


def _shapes(model: PreTrainedModel) -> Mapping[str, tuple[int, ...]]:
    """Sizes of the matrices of the decoder layers, without those of lookups and of pairs."""
    inside = {id(part) for layer in decoder_layers(model) for part in layer.modules()}
    return {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in model.named_modules()
        if id(module) in inside
        and isinstance(getattr(module, "weight", None), nn.Parameter)
        and module.weight.ndim == 2
        and not isinstance(module, nn.Embedding)
    }


def _drawn(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    if name.endswith(_SIDES[1]):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", name))
    limit = 1.0 / math.sqrt(shape[1])
    return (torch.rand(shape, generator=generator) * 2.0 - 1.0) * limit
