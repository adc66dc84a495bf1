"""The pairs of an adapter in a directory of PEFT's format: read, described, merged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from earl_core.config.model import ModelConfig
from earl_core.pretrained.adapter_checks import check_base, noted_base
from earl_core.pretrained.adapter_directory import (
    PAIRS_FILE,
    is_adapter,
    matrix_name,
    pair_names,
    read_adapter_config,
)
from earl_core.system.errors import ConfigError
from earl_core.tensors.hashing import digest_of
from earl_core.tensors.safetensors_layout import DTYPE_CODES, open_file, plan_layout
from earl_core.weights.load import manifest_from_directory, model_files, names_problem, open_weights
from earl_core.weights.manifest import (
    AdapterEntry,
    TensorEntry,
    WeightFile,
    WeightsManifest,
    config_digest,
)
from earl_core.weights.tied import check_tied, stored_name


def open_pairs(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], base_digest: str
) -> dict[str, torch.Tensor]:
    """Map the pairs of a directory by PEFT's names.

    shapes: of the pairs that the model has. base_digest: of the model, which is compared where the
    directory names one. Raises `ConfigError` for an adapter of another model.
    """
    file = directory / PAIRS_FILE
    found = open_file(file)
    other = f"the adapter in {directory} belongs to another model or has other targets"
    if problem := names_problem(found, shapes):
        raise ConfigError(f"{other}: {problem}: correct model.path or model.adapter")
    for name, shape in shapes.items():
        if tuple(found[name].shape) != tuple(shape):
            raise ConfigError(
                f"{other}: {name} is {list(found[name].shape)} there and {list(shape)} beside the "
                "model: correct model.path or model.adapter"
            )
    noted = noted_base(directory)
    if noted and base_digest and noted != base_digest:
        raise ConfigError(
            f"the adapter in {directory} was trained beside weights of digest {noted}, and the "
            f"model has {base_digest}: correct model.path"
        )
    return found


def manifest_of_policy(directory: Path, policy_version: int, model: ModelConfig) -> WeightsManifest:
    """Describe a policy on disk: a whole model's directory, or one of an adapter of `model`. Raises
    what `manifest_from_directory`, `check_tied` and `adapter_manifest` raise."""
    trusted = model.trust_remote_code
    if is_adapter(directory):
        return adapter_manifest(directory, Path(model.path), policy_version, trusted)
    check_tied(directory, trusted)
    return manifest_from_directory(directory, policy_version, trusted)


def adapter_manifest(
    directory: Path, base: Path, policy_version: int, trust_remote_code: bool = False
) -> WeightsManifest:
    """Describe an adapter's directory, so that engines load it as a publication.

    base: directory of the model that it belongs to. Raises `ConfigError` for an adapter of another
    model, and one that is more than pairs.
    """
    file, config = directory / PAIRS_FILE, read_adapter_config(directory)
    pairs = open_file(file)
    try:
        for name in pairs:
            matrix_name(name)
    except ValueError as error:
        raise ConfigError(
            f"{directory}: {error}: take an adapter that has pairs beside linear layers only"
        ) from error
    if not pairs:
        raise ConfigError(f"{file} holds no pairs")
    check_base(directory, base)
    return WeightsManifest(
        policy_version=policy_version,
        files=(WeightFile(path=str(file.absolute()), bytes=file.stat().st_size),),
        tensors={
            name: TensorEntry(dtype=DTYPE_CODES[pair.dtype], shape=tuple(pair.shape), file=0)
            for name, pair in pairs.items()
        },
        digest=digest_of(pairs),
        config_digest=config_digest(base, trust_remote_code),
        adapter=AdapterEntry(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=tuple(_targets(config.get("target_modules"), pairs)),
            base_digest=noted_base(directory),
        ),
    )


def write_merged(directory: Path, base: Path, target: Path) -> None:
    """Write the weights of a whole model, base + alpha / rank * B A, into `target`, in the files
    and dtypes of the base. Products are float32; no more than one tensor is in memory.

    Raises `ConfigError` as `adapter_manifest` does, and for pairs of matrices that the files lack.
    """
    manifest = adapter_manifest(directory, base, 0)
    assert manifest.adapter is not None
    pairs, files = open_weights(manifest, verify_digest=True), model_files(base)
    stored = {path: open_file(path) for path in files}
    every = {name: tensor for each in stored.values() for name, tensor in each.items()}
    matrices = {}
    for matrix in sorted({matrix_name(name) for name in pairs}):
        place = stored_name(matrix, every)
        if place is None:
            raise ConfigError(f"{base} has no {matrix}, beside which {directory} has a pair")
        a, b = pair_names(matrix)
        matrices[place] = (pairs[a], pairs[b])
    for path, tensors in stored.items():
        plan = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
        layout = plan_layout(plan, {"format": "pt"})
        with (target / path.name).open("wb") as file:
            file.write(layout.prefix)
            for name in layout.places:
                whole = tensors[name]
                if name in matrices:
                    first, second = (each.float() for each in matrices[name])
                    product = manifest.adapter.scale * (second @ first)
                    whole = (whole.float() + product).to(whole.dtype)
                file.write(whole.contiguous().view(-1).view(torch.uint8).numpy().data)
    index = base / "model.safetensors.index.json"
    # Some models have one of a single file, whose name nobody else knows.
    if index.is_file():
        (target / index.name).write_bytes(index.read_bytes())


def _targets(said: object, pairs: Collection[str]) -> list[str]:
    """PEFT takes a pattern as well; the pairs then say what it found."""
    if isinstance(said, list) and said:
        return sorted(map(str, said))
    return sorted({matrix_name(name).removesuffix(".weight") for name in pairs})
