"""The pairs of a published adapter beside the matrices of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from earl_core.config.model import ModelConfig
from earl_core.pretrained.adapter_checks import chosen_matrices
from earl_core.pretrained.adapter_directory import chosen, pair_names
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.hashing import digest_of
from earl_core.weights.load import names_problem, open_weights, parameters_of
from earl_core.weights.manifest import AdapterEntry, WeightsManifest
from earl_core.weights.publish import publish

Pair = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in] and B [out, rank]."""


def matched_pairs(
    manifest: WeightsManifest, matrices: Mapping[str, torch.Tensor], directory: Path, digest: str
) -> dict[str, Pair]:
    """The pair of each matrix that the manifest's targets choose, in the dtype it was published in,
    copied: whatever happens to the files later, these are the bytes that the digest is of.

    matrices: the model's, [out, in], by the names of its state dict. directory, digest: where the
    model's configuration lies, and its digest. Raises `WeightsError` for another model's pairs, for
    a pair that is missing or foreign or has another shape, and for other bytes than were published.
    """
    adapter = manifest.adapter
    assert adapter is not None
    if manifest.config_digest and manifest.config_digest != digest:
        raise WeightsError(
            f"its pairs belong to another model configuration than {directory / 'config.json'}"
        )
    named = {name: pair_names(name) for name in chosen(matrices, adapter.targets)}
    expected = {pair for names in named.values() for pair in names}
    if not expected or (problem := names_problem(manifest.tensors, expected)):
        targets = ", ".join(adapter.targets)
        raise WeightsError(
            f"the pairs of {targets} are not those of the model's matrices: "
            f"{problem if expected else 'it has none of these names'}"
        )
    for name, (a, b) in named.items():
        out, into = matrices[name].shape
        for pair, shape in ((a, (adapter.rank, into)), (b, (out, adapter.rank))):
            if manifest.tensors[pair].shape != shape:
                raise WeightsError(
                    f"{pair} has shape {list(manifest.tensors[pair].shape)}, rank {adapter.rank} "
                    f"beside the model's matrix makes {list(shape)}"
                )
    copied = {name: tensor.clone() for name, tensor in open_weights(manifest).items()}
    found = digest_of(copied)
    if found != manifest.digest:
        raise WeightsError(
            f"the bytes have digest {found}, the manifest says {manifest.digest}: publish the "
            "weights again"
        )
    return {name: (copied[a], copied[b]) for name, (a, b) in named.items()}


def layer_matrices(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a model's parameters that are matrices of its layers, which are numbered."""
    return {
        name: each
        for name, each in parameters.items()
        if each.ndim == 2 and any(part.isdigit() for part in name.split("."))
    }


def publish_unchanged(model: ModelConfig, directory: Path, policy_version: int) -> WeightsManifest:
    """Publish pairs of the model's adapter that change nothing of it, because B is 0: an engine
    takes as long with them as with any. Raises `ConfigError` for an adapter that cannot be."""
    adapter = model.adapter
    assert adapter is not None
    parameters = parameters_of(Path(model.path), model.trust_remote_code)
    shapes = {name: tuple(each.shape) for name, each in layer_matrices(parameters).items()}
    names, targets = chosen_matrices(adapter, shapes)
    pairs: dict[str, torch.Tensor] = {}
    # Equal bytes, and so one digest, whoever makes them.
    generator = torch.Generator().manual_seed(0)
    for name in names:
        (out, into), (a, b) = shapes[name], pair_names(name)
        pairs[a] = torch.randn(adapter.rank, into, generator=generator) / into**0.5
        pairs[b] = torch.zeros(out, adapter.rank)
    entry = AdapterEntry(rank=adapter.rank, alpha=adapter.alpha, targets=tuple(targets))
    return publish(pairs, directory, policy_version, "float32", adapter=entry)
