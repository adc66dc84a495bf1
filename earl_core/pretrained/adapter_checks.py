"""Whether a model can have the adapter that a run file asks for. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from earl_core.config.model import AdapterConfig, ModelConfig
from earl_core.pretrained.adapter_directory import chosen, read_adapter_config
from earl_core.pretrained.model_directory import read_model_shape, tensor_shapes
from earl_core.system.errors import ConfigError

_IN_A_LAYER = re.compile(r"\.\d+\..*\.weight$")


def check_adapter(model: ModelConfig) -> None:
    """Raise `ConfigError` where the model of `path` cannot have the adapter, by the headers of its
    files; the learner, which knows its matrices, checks again."""
    if model.adapter is None:
        return
    directory = Path(model.path)
    shape = read_model_shape(directory)
    if shape.experts > 1:
        raise ConfigError(
            f"{directory} is a mixture of {shape.experts} experts, beside which no adapter is "
            "trained: leave model.adapter out, or choose a dense model"
        )
    if matrices := _matrices(directory):
        chosen_matrices(model.adapter, matrices)
    if model.adapter.source is not None:
        check_source(model.adapter, Path(model.adapter.source))


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
