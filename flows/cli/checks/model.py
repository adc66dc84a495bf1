"""Check that a model directory holds the files that every run reads. Looks at file names only."""

from __future__ import annotations

import json
from pathlib import Path

from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text

_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer*", "tokenization_*.py", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_WEIGHTS = {"vllm": ("*.safetensors",), "torch": ("*.safetensors", "pytorch_model*.bin")}


def check_files(path: Path, engine: str) -> None:
    """Raise `ConfigError` for the first thing without which workers that load the directory `path`
    (it has a config.json) would fail. engine: `vllm` or `torch`."""
    if not _any(path, _WEIGHTS[engine]):
        if engine == "vllm" and _any(path, _WEIGHTS["torch"]):
            raise ConfigError(
                f"{path} has no safetensors weights, and rollout.engine=vllm reads no others",
                remedy="copy model.safetensors into it, or set rollout.engine=torch",
            )
        advice = "copy model.safetensors into it, or correct model.path"
        raise ConfigError(f"{path} has no weights", remedy=advice)
    if absent := _absent_parts(path):
        raise ConfigError(
            f"{path} lacks {len(absent)} of the weight files in its index, such as {absent[0]}",
            remedy="copy them into it; a download may have stopped half-way",
        )
    if not _any(path, _TOKENIZERS):
        advice = "copy the tokenizer's files into it, such as tokenizer.json"
        raise ConfigError(f"{path} has no tokenizer", remedy=advice)


def _any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(file.is_file() for pattern in patterns for file in path.glob(pattern))


def _absent_parts(path: Path) -> list[str]:
    try:
        index = json.loads(read_text(path / _INDEX, str(path / _INDEX)))
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ConfigError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [name for name in names if not (path / name).is_file()]
