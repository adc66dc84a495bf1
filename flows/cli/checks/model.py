"""Whether a model directory holds what every run reads of it. Looks at file names only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer*", "tokenization_*.py", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_WEIGHTS = {"vllm": ("*.safetensors",), "torch": ("*.safetensors", "pytorch_model*.bin")}


class Missing(NamedTuple):
    """What a model directory lacks, and what to do about it."""

    text: str
    advice: str


def missing_files(path: Path, engine: str) -> Missing | None:
    """The first thing without which workers that load the directory `path` (it has a config.json)
    would fail; None: nothing. engine: `vllm` or `torch`."""
    if not _any(path, _WEIGHTS[engine]):
        if engine == "vllm" and _any(path, _WEIGHTS["torch"]):
            text = f"{path} has no safetensors weights, and rollout.engine=vllm reads no others"
            return Missing(text, "copy model.safetensors into it, or set rollout.engine=torch")
        advice = "copy model.safetensors into it, or correct model.path"
        return Missing(f"{path} has no weights", advice)
    absent = _absent_parts(path)
    if absent:
        text = f"{path} lacks {len(absent)} of the weight files in its index, such as {absent[0]}"
        return Missing(text, "copy them into it; a download may have stopped half-way")
    if not _any(path, _TOKENIZERS):
        advice = "copy the tokenizer's files into it, such as tokenizer.json"
        return Missing(f"{path} has no tokenizer", advice)
    return None


def _any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(file.is_file() for pattern in patterns for file in path.glob(pattern))


def _absent_parts(path: Path) -> list[str]:
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [name for name in names if not (path / name).is_file()]
