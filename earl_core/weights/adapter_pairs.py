"""The pairs of a published adapter, matched to the matrices of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from earl_core.pretrained.adapter_directory import chosen, pair_names
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.hashing import digest_of
from earl_core.weights.load import names_problem, open_weights
from earl_core.weights.manifest import WeightsManifest

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
