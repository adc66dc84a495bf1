"""Adapters for engine tests, and the models that they make of theirs by the plain formula."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from earl_core.pretrained.adapter_directory import chosen, matrix_name, pair_names
from earl_core.weights.manifest import AdapterEntry, WeightsManifest
from earl_core.weights.publish import publish

TARGETS = ("q_proj", "v_proj", "down_proj")
RANK = 4
ALPHA = 6.0


def random_pairs(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Pairs of the targets' matrices, float32; their products are about as large as these."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    pairs: dict[str, torch.Tensor] = {}
    for matrix in chosen((n for n in parameters if n.endswith(".weight")), TARGETS):
        (out, into), (a, b) = parameters[matrix].shape, pair_names(matrix)
        pairs[a] = torch.randn(RANK, into, generator=generator) / into**0.5
        pairs[b] = torch.randn(out, RANK, generator=generator) / 4
    return pairs


def published(
    pairs: Mapping[str, torch.Tensor],
    directory: Path,
    version: int,
    dtype: str = "float32",
    config_digest: str = "",
) -> WeightsManifest:
    """The pairs as a version of a policy."""
    adapter = AdapterEntry(rank=RANK, alpha=ALPHA, targets=TARGETS)
    return publish(pairs, directory, version, dtype, config_digest=config_digest, adapter=adapter)


def merged(model: PreTrainedModel, pairs: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """A copy of the model in float64 whose matrices are W + alpha / rank * B A."""
    result = copy.deepcopy(model).double()
    parameters = dict(result.named_parameters())
    for matrix in {matrix_name(name) for name in pairs}:
        a, b = (pairs[name].double() for name in pair_names(matrix))
        parameters[matrix].data += ALPHA / RANK * (b @ a)
    return result
