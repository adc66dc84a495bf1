"""Check that a model directory says one thing about its output layer.

Where the files of a model with tied embeddings have an output layer of their own with other
values, transformers unties them and engines tie them: the trained policy would not be the one that
plays. The same happens where a configuration and the text configuration in it disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from earl_core.system.errors import ConfigError
from earl_core.tensors.safetensors_layout import open_file
from earl_core.weights.load import parameters_of, tensor_files

_FLAG = "tie_word_embeddings"
_TEXT = ("text", "language", "llm", "thinker", "decoder")
"""Words in the name of a nested configuration that is the language model's."""


def check_tied(directory: Path, trust_remote_code: bool = False) -> None:
    """Raise `ConfigError` where the files, or two configurations, contradict each other.
    trust_remote_code: whether code that lies in the directory may define the model."""
    _check_flags(directory / "config.json")
    stored = {
        name: tensor
        for file in tensor_files(directory, "model")
        for name, tensor in open_file(file).items()
    }
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in parameters_of(directory, trust_remote_code).items():
        by_tensor.setdefault(id(parameter), []).append(name)
    for names in by_tensor.values():
        given = [found for name in names if (found := stored_name(name, stored)) is not None]
        for other in given[1:]:
            if not _equal(stored[given[0]], stored[other]):
                raise ConfigError(
                    f"{directory} ties {given[0]} and {other}, but its files hold both, with "
                    f"different values: set {_FLAG} to false in its config.json, which keeps both, "
                    f"or remove {other} from the files"
                )


def _check_flags(path: Path) -> None:
    flags = dict(_flags(json.loads(path.read_text(encoding="utf-8"))))
    if len(set(flags.values())) > 1:
        said = " and ".join(f"{name} {str(value).lower()}" for name, value in flags.items())
        raise ConfigError(
            f"{path} contradicts itself ({said}): give them one value, true where the output layer "
            "is the embeddings and the files have none of its own"
        )


def _flags(config: dict[str, Any], place: str = "") -> Iterator[tuple[str, bool]]:
    if isinstance(config.get(_FLAG), bool):
        yield f"{place}{_FLAG}", config[_FLAG]
    for name, nested in config.items():
        if isinstance(nested, dict) and any(word in name for word in _TEXT):
            yield from _flags(nested, f"{place}{name}.")


def stored_name(name: str, stored: Mapping[str, torch.Tensor]) -> str | None:
    """A parameter's name among stored tensors; older files leave the first parts out. None: it is
    not there."""
    while name not in stored:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return name


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other.dtype), other)
