"""Contents of a model directory: its tokenizer, and the numbers of its configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from earl_core.config.model import ModelConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.system.errors import ConfigError
from earl_core.system.files import open_file
from earl_core.system.outside import read_text
from earl_core.trajectory.routing import RoutingShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READ = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_BESIDE_TEXT = {
    "visual": "the vision tower",
    "mtp": "the layers that guess tokens further ahead",
}
"""Parts of a released model, by a word of their tensors' names."""
_MOST_TEMPLATE = 4 << 20
_MOST_HEADER = 100_000_000
"""Bytes of a safetensors file's header, by its own library."""


def model_directory(config: ModelConfig) -> Path:
    """Return the directory of the initial model. Raises `ConfigError` when there is none."""
    directory = Path(config.path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"there is no model at {directory} (no config.json in it): set model.path to a Hugging "
            "Face model directory, or model.builder to a function that makes one"
        )
    return directory


def read_model_shape(directory: Path) -> ModelShape:
    """The numbers of `config.json`, under the names that Llama-, Qwen- and GPT-2-like models use.
    Raises `ConfigError` when the directory is not a model or its configuration lacks a number."""
    path = directory / "config.json"
    try:
        return ModelShape.from_config(json.loads(read_text(path, str(path))))
    except OSError as error:
        raise ConfigError(
            f"model.path {str(directory)!r} is not a model directory (no config.json): prepare "
            "the model first, or give model.builder"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error


def stored_routing(directory: Path) -> RoutingShape | None:
    """What may be recorded of a token; None for a model without routers. Raises as
    `read_model_shape`."""
    return read_model_shape(directory).routing


def published_bytes(directory: Path, dtype: str) -> int:
    """Bytes of the model's weights once they are published in this dtype.

    From the headers of the safetensors files that are loaded: others may lie beside them, such as
    the same weights in one file. By its shape where it has none. Raises `ConfigError`
    for a directory that is no model, or a file that cannot be read.
    """
    value = 4 if dtype == "float32" else 2
    files = weight_files(directory)
    if not files:
        return value * read_model_shape(directory).parameters
    return sum(_numbers(file, value) for file in files)


def weight_files(directory: Path) -> list[Path]:
    """List the files of an index, or one, as `weights.load.tensor_files` has it; else all."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not index.is_file():
        return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / name for name in sorted(named)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights that can be read: {error}") from error


def _numbers(file: Path, value: int) -> int:
    """Bytes of a file's tensors when those of floating-point numbers have `value` bytes each."""
    return sum(
        math.prod(entry["shape"]) * value
        if "F" in entry["dtype"]
        else entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in read_header(file).items()
        if name != "__metadata__"
    )


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: dtype, shape and data_offsets of each tensor, and
    `__metadata__`. Raises `ConfigError` for a file that cannot be read."""
    try:
        with open_file(file, follow_links=True) as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _MOST_HEADER:
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                math.prod(entry["shape"]), "F" in entry["dtype"], entry["data_offsets"][1]
        return dict(header)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{file} is no safetensors file that can be read: {error}") from error


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in the files of a model directory; empty where it has none."""
    return {
        name: tuple(entry["shape"])
        for file in weight_files(directory)
        for name, entry in read_header(file).items()
        if name != "__metadata__"
    }


def parts_left_out(directory: Path, model: Collection[str]) -> list[str]:
    """Name what the files of a model directory hold beside its language model, with the count of
    parameters. model: names of the model's parameters."""
    stored, found = tensor_shapes(directory), []
    for part, words in _BESIDE_TEXT.items():
        if not any(part in name.split(".") for name in model):
            sizes = [math.prod(s) for name, s in stored.items() if part in name.split(".")]
            found += [f"{words} ({sum(sizes):,} parameters)"] if sizes else []
    return found


def needed_files(names: Sequence[str]) -> list[str]:
    """Choose from a repository's files: weights in one format, configuration, tokenizer, no
    sub-folders, and no adapter that lies beside them."""
    top = [
        name
        for name in names
        if PurePosixPath(name).parent == PurePosixPath(".") and not name.startswith("adapter_")
    ]
    weights = [name for name in top if name.endswith(".safetensors")]
    weights = weights or [name for name in top if name.startswith("pytorch_model")]
    return [name for name in top if name in weights or PurePosixPath(name).suffix in _READ]


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with `config.chat_template` in place of its own when given. Raises
    `ConfigError` for a directory without a tokenizer, and for a template that is not there."""
    from transformers import AutoTokenizer

    directory, template = model_directory(config), config.chat_template
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model directory {directory} has no tokenizer that transformers can load "
            f"({str(error).splitlines()[0]}): copy the tokenizer's files into it"
        ) from error
    legacy = directory / "chat_template.json"
    if tokenizer.chat_template is None and legacy.is_file():
        # Of models with images, whose processors alone read it.
        with suppress(ValueError, KeyError, TypeError):
            tokenizer.chat_template = json.loads(legacy.read_text("utf-8"))["chat_template"]
    if template is not None:
        try:
            what = f"the chat template {template}"
            tokenizer.chat_template = read_text(Path(template), what, _MOST_TEMPLATE)
        except OSError as error:
            raise ConfigError(
                f"the chat template {template} cannot be read ({error.strerror}): correct "
                "model.chat_template, or remove it to use the tokenizer's own"
            ) from error
    return tokenizer
