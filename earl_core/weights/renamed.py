"""Publish a model directory whose files have other names than the model's parameters.

Files of mixtures have a tensor for each expert, transformers' models one for all of a layer, and
some families' files have names of an older form.
"""

from __future__ import annotations

from pathlib import Path

from earl_core.tensors.errors import WeightsError
from earl_core.tensors.safetensors_layout import DTYPES
from earl_core.weights.load import parameters_of
from earl_core.weights.manifest import WeightsManifest
from earl_core.weights.publish import publish


def has_names_of_parameters(
    manifest: WeightsManifest, directory: Path, trust_remote_code: bool = False
) -> bool:
    """Whether a directory's files, as `manifest_from_directory` has them, have a tensor for each
    parameter of its model, and no other: a router's bias in them is none."""
    return {*manifest.tensors, *manifest.tied} == {*parameters_of(directory, trust_remote_code)}


def publish_renamed(
    manifest: WeightsManifest, directory: Path, target: Path, trust_remote_code: bool = False
) -> WeightsManifest:
    """Publish the directory's model in `target`, under the version of `manifest`: its parameters as
    transformers reads them, in the widest dtype of the files. Needs the memory of the model, twice
    for a moment. Raises `WeightsError` for a parameter of which the files have nothing."""
    from transformers import AutoModelForCausalLM

    dtypes = {DTYPES[each.dtype] for each in manifest.tensors.values()}
    dtype = max((each for each in dtypes if each.is_floating_point), key=lambda each: each.itemsize)
    model, told = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    if missing := sorted(told["missing_keys"]):
        raise WeightsError(
            f"the files in {directory} lack {len(missing)} parameters (first: {missing[0]})"
        )
    return publish(
        dict(model.named_parameters()),
        target,
        manifest.policy_version,
        dtype,
        config_digest=manifest.config_digest,
    )
