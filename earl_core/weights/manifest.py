"""The content of a set of published policy weights.

A `WeightsManifest` describes safetensors files by name, size, dtype and shape. Engines, learners
and checkpoints exchange manifests only; the bytes stay where they were written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from earl_core.pretrained.architecture import model_config
from earl_core.weights.probe import ProbedRow

_VOLATILE_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_experts_implementation_internal",
        "attn_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WeightFile(_Frozen):
    """One safetensors file: an absolute path and its size in bytes."""

    path: str
    bytes: int = Field(ge=8)


class TensorEntry(_Frozen):
    """One tensor: safetensors dtype code (`F32`, `BF16`, …), shape, index into `files`."""

    dtype: str
    shape: tuple[int, ...]
    file: int = Field(ge=0)


class AdapterEntry(_Frozen):
    """The tensors are pairs of an adapter, named as PEFT names them, and no whole model.

    alpha: their product is scaled by alpha / rank. targets: ends of the names of the matrices that
    have a pair. base_digest: of the tensors in the files of the model that the pairs belong to;
    empty where nobody wrote it down.
    """

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    targets: tuple[str, ...] = Field(min_length=1)
    base_digest: str = ""

    @property
    def scale(self) -> float:
        """Factor of the product of a pair."""
        return self.alpha / self.rank


class WeightsManifest(_Frozen):
    """A sealed set of weights under Hugging Face state-dict names.

    `tied` maps a name that was left out (as `save_pretrained` leaves out a tied `lm_head.weight`)
    to the name whose bytes it shares. `digest` is xxh3_128 over names, dtypes, shapes and hashes of
    bytes in the order of names, so equal weights have equal digests however they are split into
    files and whoever wrote them.
    `config_digest` is empty when the publisher gave no model configuration. `adapter` is none where
    the tensors are a whole model's; an engine adds an adapter's to the model of `model.path`.
    `probe` is empty where no batch was trained on.
    """

    schema_version: Literal[1] = 1
    policy_version: int = Field(ge=0)
    files: tuple[WeightFile, ...] = Field(min_length=1)
    tensors: dict[str, TensorEntry] = Field(min_length=1)
    tied: dict[str, str] = Field(default_factory=dict)
    digest: str
    config_digest: str = ""
    adapter: AdapterEntry | None = None
    probe: tuple[ProbedRow, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> WeightsManifest:
        for name, entry in self.tensors.items():
            if entry.file >= len(self.files):
                raise ValueError(f"tensor {name} points at file {entry.file}, which is not listed")
        for name, kept in self.tied.items():
            if kept not in self.tensors or name in self.tensors:
                raise ValueError(f"tied weight {name} -> {kept} does not match the tensors listed")
        return self

    @property
    def names(self) -> frozenset[str]:
        """Every state-dict name, tied ones included."""
        return frozenset(self.tensors) | frozenset(self.tied)

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.files)


def config_digest(config: Mapping[str, Any] | Path, trust_remote_code: bool = False) -> str:
    """Digest of what a model configuration says about the network, as 32 hex digits.

    `config` is a dictionary made by `PretrainedConfig.to_dict()` or a model directory, which is
    read with `model_config` so that defaults count. Fields that change without changing the
    network (precision, library version, attention kernel) are left out. trust_remote_code: whether
    code that lies in the directory may define the configuration.
    """
    fields: Mapping[str, Any]
    if isinstance(config, Path):
        fields = model_config(config, trust_remote_code).to_dict()
    else:
        fields = config
    kept = {key: value for key, value in fields.items() if key not in _VOLATILE_CONFIG_KEYS}
    text = json.dumps(kept, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def mark_hashed(path: Path, digest: str) -> None:
    """Say that the file's tensors have this digest, 32 hex digits, so that none of its readers
    needs to hash it; before others can see it.

    Who publishes it has hashed its bytes, and sets the file's time of change to one that follows
    from the digest; whatever is written to the file afterwards sets it to the present, and a file
    that was put in its place has another. A write through a mapping does not always set it, but
    only the process that wrote the file has a writable mapping of it.
    """
    time = _time_of(digest)
    os.utime(path, ns=(time, time), follow_symlinks=False)


def was_hashed(path: Path, digest: str) -> bool:
    """Tell whether the file was hashed, had this digest, and nothing was written since."""
    return os.stat(path).st_mtime_ns == _time_of(digest)


def _time_of(digest: str) -> int:
    """Nanoseconds, in the years 1970 to 2003 that every file system knows."""
    seconds, rest = int(digest[:8], 16) % 2**30, int(digest[8:16], 16) % 10**9
    return seconds * 10**9 + rest
