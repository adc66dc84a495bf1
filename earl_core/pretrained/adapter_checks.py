"""Whether a model can have the adapter that a run file asks for. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from earl_core.config.model import AdapterConfig, ModelConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.pretrained.adapter_directory import (
    BASE_DIGEST,
    CONFIG_FILE,
    PAIRS_FILE,
    chosen,
    matrix_name,
    pair_names,
    read_adapter_config,
)
from earl_core.pretrained.model_directory import read_header, read_model_shape, tensor_shapes
from earl_core.pretrained.weight_digest import adapted_files, stored_digest
from earl_core.system.errors import ConfigError

_IN_A_LAYER = re.compile(r"\.\d+\..*\.weight$")
_WITHOUT_LINEAR_LAYERS = ("gpt2", "openai-gpt")
_IN_A_STACK = re.compile(r"\.\d+\.")


def check_adapter(model: ModelConfig) -> None:
    """Raise `ConfigError` where the model of `path` cannot have the adapter, by the headers of its
    files; the learner, which knows its matrices, checks again. Likewise for a model that libraries
    take for an adapter."""
    directory = Path(model.path)
    check_whole_model(directory)
    if model.adapter is None:
        return
    check_adaptable(model, read_model_shape(directory))
    adapted_files(directory)
    names: list[str] = []
    if matrices := _matrices(directory):
        names, _ = chosen_matrices(model.adapter, matrices)
    if model.adapter.source is not None:
        source = Path(model.adapter.source)
        check_source(model.adapter, source)
        # Files of several models, such as one of images, do not say which one is trained.
        if len({_IN_A_STACK.split(name, maxsplit=1)[0] for name in names}) == 1:
            _check_pairs(source, model.adapter.rank, {name: matrices[name] for name in names})


def check_adaptable(model: ModelConfig, shape: ModelShape) -> None:
    """Raise `ConfigError` where an adapter is asked for that no model of this shape can have."""
    if model.adapter is None:
        return
    if shape.experts > 1:
        raise ConfigError(
            f"{model.path} is a mixture of {shape.experts} experts, beside which no adapter is "
            "trained: leave model.adapter out, or choose a dense model"
        )
    if shape.model_type in _WITHOUT_LINEAR_LAYERS:
        raise ConfigError(
            f"{model.path} is a {shape.model_type} model, whose matrices are no linear layers "
            "(transformers' Conv1D), beside which no adapter is trained: leave model.adapter out, "
            "or choose another model"
        )


def check_first_pairs(model: ModelConfig) -> None:
    """`check_adapter`; raise `ConfigError` also where the pairs to begin from say that they were
    trained beside other weights, all of which are then read."""
    check_adapter(model)
    if model.adapter is not None and model.adapter.source is not None:
        check_base(Path(model.adapter.source), Path(model.path))


def check_whole_model(directory: Path) -> None:
    """Raise `ConfigError` for a model that libraries take for an adapter."""
    if (directory / CONFIG_FILE).exists():
        # Where PEFT is installed, transformers loads the model that this file names instead.
        raise ConfigError(
            f"{directory} is a whole model, but has an {CONFIG_FILE}, by which libraries take it "
            "for an adapter: move that file away"
        )


def pairs_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the adapter's pairs once they are published in this dtype, by the headers of the
    model's files; 0 where it has none. Raises `ConfigError` as `check_adapter` does."""
    assert model.adapter is not None
    if not (matrices := _matrices(Path(model.path))):
        return 0
    names, _ = chosen_matrices(model.adapter, matrices)
    numbers = sum(model.adapter.rank * sum(matrices[name]) for name in names)
    return (4 if dtype == "float32" else 2) * numbers


def _matrices(directory: Path) -> dict[str, tuple[int, ...]]:
    return {
        name: size
        for name, size in tensor_shapes(directory).items()
        if len(size) == 2 and _IN_A_LAYER.search(name)
    }


def chosen_matrices(
    adapter: AdapterConfig, matrices: Mapping[str, Sequence[int]]
) -> tuple[list[str], list[str]]:
    """Names of the matrices that get a pair, and the targets by their ends.

    matrices: sizes of those of all decoder layers, by name, `.weight` included. Raises
    `ConfigError` for a target that is none of them, and for a rank above the smaller size of one.
    """
    ends = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in matrices})
    targets = ends if adapter.targets == "all-linear" else list(adapter.targets)
    for target in targets:
        if not chosen(matrices, [target]):
            raise ConfigError(
                f"model.adapter.targets names {target!r}, which is no matrix of the model's "
                f"decoder layers: they have {', '.join(ends)}, and head and embedding get no pair"
            )
    names = chosen(matrices, targets)
    if not names:
        raise ConfigError(
            "model.adapter finds no matrix to stand beside: name model.adapter.targets"
        )
    for name in names:
        if adapter.rank > min(matrices[name]):
            raise ConfigError(
                f"model.adapter.rank {adapter.rank} exceeds the smaller size of {name} "
                f"({' x '.join(map(str, matrices[name]))}): set {min(matrices[name])} or less"
            )
    return names, targets


def check_source(adapter: AdapterConfig, directory: Path) -> None:
    """Raise `ConfigError` where the run's settings contradict the adapter in the directory."""
    config = read_adapter_config(directory)
    for key, setting, wanted in (
        ("r", "rank", adapter.rank),
        ("lora_alpha", "alpha", adapter.alpha),
    ):
        if config.get(key) != wanted:
            raise ConfigError(
                f"{directory} holds an adapter of {setting} {config.get(key)}, and model.adapter."
                f"{setting} is {wanted:g}: set it to {config.get(key)}"
            )


def noted_base(directory: Path) -> str:
    """The digest of the weights that the adapter in the directory was trained beside; empty where
    it does not say."""
    header = read_header(directory / PAIRS_FILE)
    return str(header.get("__metadata__", {}).get(BASE_DIGEST, ""))


def check_base(directory: Path, base: Path) -> None:
    """Raise `ConfigError` where the adapter in `directory` says that it was trained beside other
    weights than those of the model directory `base`, all bytes of which are then read."""
    noted = noted_base(directory)
    if noted and (digest := stored_digest(base)) != noted:
        raise ConfigError(
            f"the adapter in {directory} was trained beside weights of digest {noted}, and {base} "
            f"has {digest}: take the model that it belongs to"
        )


def _check_pairs(directory: Path, rank: int, matrices: Mapping[str, Sequence[int]]) -> None:
    """Raise `ConfigError` unless the adapter in the directory has pairs of these matrices.

    By the ends of their names and their sizes, because the files of a model may begin its names
    otherwise than PEFT does.
    """
    header = read_header(directory / PAIRS_FILE)
    found = Counter[tuple[str, str]]()
    for name, entry in header.items():
        if name != "__metadata__":
            found[_kind(directory, name, entry["shape"])] += 1
    expected = Counter[tuple[str, str]]()
    for name, (out, into) in matrices.items():
        for pair, shape in zip(pair_names(name), ((rank, into), (out, rank)), strict=True):
            expected[_kind(directory, pair, shape)] += 1
    told = [
        f"{each.total()} tensors {what} (such as {' '.join(min(each))})"
        for what, each in (
            ("are missing", expected - found),
            ("are not expected", found - expected),
        )
        if each
    ]
    if told:
        raise ConfigError(
            f"the adapter in {directory} belongs to another model or has other targets: "
            f"{' and '.join(told)}: correct model.path or model.adapter"
        )


def _kind(directory: Path, pair: str, shape: Sequence[int]) -> tuple[str, str]:
    """What an A or B of this name is: the end of its matrix's name and its own, and its sizes."""
    try:
        end = matrix_name(pair).removesuffix(".weight").rpartition(".")[2]
    except ValueError as error:
        raise ConfigError(
            f"{directory}: {error}: take an adapter that has pairs beside linear layers only"
        ) from error
    side = pair.removesuffix(".weight").rpartition(".")[2]
    return f"{end}.{side}", " x ".join(map(str, shape))
