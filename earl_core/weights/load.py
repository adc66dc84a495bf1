"""Open published weights, or a model directory, as mapped tensors, and match them to a model's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from earl_core.dispatch.segments import page_lock
from earl_core.dispatch.segments.leases import map_shared
from earl_core.dispatch.segments.pool_directory import is_sealed
from earl_core.pretrained.architecture import model_config
from earl_core.system.errors import ConfigError
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.hashing import digest_of
from earl_core.tensors.safetensors_layout import DTYPE_CODES, open_file, tensors_in
from earl_core.weights.manifest import (
    TensorEntry,
    WeightFile,
    WeightsManifest,
    config_digest,
    was_hashed,
)


def open_weights(
    manifest: WeightsManifest, *, verify_digest: bool = False
) -> Mapping[str, torch.Tensor]:
    """Map every tensor of the manifest, without copying; tied names are included.

    Sizes, names, dtypes and shapes are always checked against the files, the bytes only with
    `verify_digest`, and only of files that were not hashed on this host when they were sealed.
    Raises `WeightsError` with what differs. The tensors keep the mapping alive. They may be written
    to without changing the file (copy-on-write), but for publications in a process that uses a GPU:
    these are page-locked and read-only.
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, file in enumerate(manifest.files):
        expected = {name: entry for name, entry in manifest.tensors.items() if entry.file == index}
        tensors.update(_open_file(file, expected))
    if verify_digest and not _hashed_here(manifest):
        digest = digest_of(tensors)
        if digest != manifest.digest:
            raise WeightsError(
                f"the bytes of policy version {manifest.policy_version} have digest {digest}, "
                f"the manifest says {manifest.digest}: publish the weights again"
            )
    tensors.update({name: tensors[kept] for name, kept in manifest.tied.items()})
    return MappingProxyType(tensors)


def manifest_from_directory(
    directory: Path, policy_version: int, trust_remote_code: bool = False
) -> WeightsManifest:
    """Describe a Hugging Face model directory, so that it loads by the path of `publish`.

    Reads `model.safetensors` or the files of `model.safetensors.index.json`. trust_remote_code:
    whether code that lies in the directory may define the model.
    """
    files = model_files(directory)
    entries: dict[str, TensorEntry] = {}
    tensors: dict[str, torch.Tensor] = {}
    described: list[WeightFile] = []
    for index, path in enumerate(files):
        opened = open_file(path)
        described.append(WeightFile(path=str(path.absolute()), bytes=path.stat().st_size))
        for name, tensor in opened.items():
            code = DTYPE_CODES[tensor.dtype]
            entries[name] = TensorEntry(dtype=code, shape=tuple(tensor.shape), file=index)
        tensors |= opened
    parameters = parameters_of(directory, trust_remote_code)
    return WeightsManifest(
        policy_version=policy_version,
        files=tuple(described),
        tensors=entries,
        tied=_tied_names(parameters, frozenset(entries)),
        digest=digest_of(tensors),
        config_digest=config_digest(directory, trust_remote_code),
    )


def _hashed_here(manifest: WeightsManifest) -> bool:
    """Asked while the files are mapped, so that they are those whose names are looked at."""
    return all(was_hashed(Path(file.path), manifest.digest) for file in manifest.files)


def _mapped(path: Path, size: int) -> dict[str, torch.Tensor]:
    if is_sealed(path.name) and page_lock.cudart() is not None:
        # Mapped once for all publications that use these pages; a private mapping would be copied
        # by the lock.
        shared = map_shared(path, size)
        shared.page_lock()
        return tensors_in(shared.memory, path)
    return open_file(path, size)


def _open_file(file: WeightFile, expected: dict[str, TensorEntry]) -> dict[str, torch.Tensor]:
    path = Path(file.path)
    try:
        opened = _mapped(path, file.bytes)
    except OSError as error:
        raise WeightsError(
            f"the weights file {path} cannot be opened ({error.strerror}): publish the weights "
            "again, or load them from a checkpoint"
        ) from error
    problem = names_problem(opened, expected)
    if problem is not None:
        raise WeightsError(f"{path} is not the file that was published: {problem}")
    for name, tensor in opened.items():
        entry, code = expected[name], DTYPE_CODES[tensor.dtype]
        if (code, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise WeightsError(
                f"{name} in {path} is {code} {list(tensor.shape)}, the manifest says {entry.dtype} "
                f"{list(entry.shape)}"
            )
    return opened


def matched(
    manifest: WeightsManifest, state: Mapping[str, torch.Tensor], directory: Path, digest: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`match` of a model's parameters with published weights, whose bytes are checked. directory,
    digest: where the model's configuration lies, and its digest. Raises `WeightsError`."""
    if manifest.config_digest and manifest.config_digest != digest:
        raise WeightsError(
            f"it was published for another model configuration than {directory / 'config.json'}"
        )
    return match(state, open_weights(manifest, verify_digest=True))


def model_files(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face model directory; raises `WeightsError` for none."""
    if files := tensor_files(directory, "model"):
        return files
    raise WeightsError(
        f"{directory} holds no model.safetensors (or index): point model.path at a Hugging Face "
        "model directory with safetensors weights, or give a model.builder"
    )


def tensor_files(directory: Path, stem: str) -> list[Path]:
    """`stem.safetensors`, or the files that `stem.safetensors.index.json` names; none: []."""
    index = directory / f"{stem}.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise WeightsError(f"{index} names files outside of its directory")
        return [directory / name for name in names]
    single = directory / f"{stem}.safetensors"
    return [single] if single.is_file() else []


def parameters_of(directory: Path, trust_remote_code: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of the model that transformers makes of a directory's configuration, on the
    meta device: names that are one tensor have one. Nothing of the weights is read. Raises
    ConfigError where transformers makes no causal language model of it."""
    from transformers import AutoModelForCausalLM

    config = model_config(directory, trust_remote_code)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ConfigError(
            f"transformers has no causal language model of type {config.model_type} "
            "(AutoModelForCausalLM): choose another model"
        ) from error
    model.tie_weights()
    return dict(model.named_parameters(remove_duplicate=False))


def _tied_names(parameters: Mapping[str, torch.Tensor], present: frozenset[str]) -> dict[str, str]:
    """Names that the model has but the files leave out because they share another's memory."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        by_tensor.setdefault(id(parameter), []).append(name)
    tied: dict[str, str] = {}
    for names in by_tensor.values():
        kept = next((name for name in names if name in present), None)
        if kept is not None:
            tied.update({name: kept for name in names if name not in present})
    return tied


def match(
    state: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(model tensor, published tensor) for each tensor of the model, each memory once.

    `state` has the model's parameters by name. Names that share memory in the model (tied
    embeddings) need only one published tensor. Raises `WeightsError` for missing or unknown names,
    other shapes, and different values published for one shared tensor.
    """
    groups: dict[int, list[str]] = {}
    for name, target in state.items():
        placed = target.numel() and not target.is_meta
        groups.setdefault(target.data_ptr() if placed else id(target), []).append(name)
    published = [[name for name in names if name in weights] for names in groups.values()]
    covered = {
        name
        for names, given in zip(groups.values(), published, strict=True)
        if given
        for name in names
    }
    problem = names_problem(covered | weights.keys(), state.keys())
    if problem is not None:
        raise WeightsError(problem)
    return [_pair(state[given[0]], given, weights) for given in published]


def _pair(
    target: torch.Tensor, names: list[str], weights: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    first, *others = names
    source = weights[first]
    if target.shape != source.shape:
        raise WeightsError(
            f"{first} has shape {list(source.shape)}, the model's has {list(target.shape)}"
        )
    for other in others:
        if not torch.equal(source, weights[other]):
            raise WeightsError(
                f"{first} and {other} are one tensor in the model but were published with "
                "different values: the learner trains another configuration"
            )
    return target, source


def names_problem(found: Collection[str], expected: Collection[str]) -> str | None:
    """Describe the difference between two sets of tensor names, as a sentence part; None when they
    are equal."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing (first: {missing[0]})")
    if unknown:
        parts.append(f"{len(unknown)} tensors are not expected (first: {unknown[0]})")
    return " and ".join(parts) or None
