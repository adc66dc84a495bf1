"""The files of a training state that hold the policy, a whole model's or an adapter's, and those
beside its weights: the ones of its model directory, as they lie.

Libraries write such files anew in their own way and refuse some that they have read: a generation
configuration that contradicts itself, settings of sampling in `config.json`. So nothing is written
that can be copied. `config.json` takes three things of the learner: the class, the dtype, and the
positions that it has pinned.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from earl_core.config.model import AdapterConfig
from earl_core.learner.low_rank import pairs_of, peft_name
from earl_core.pretrained.adapter_checks import check_source
from earl_core.pretrained.adapter_directory import (
    ADAPTER_FOLDER,
    BASE_DIGEST,
    PAIRS_FILE,
    POLICY_FOLDER,
    adapter_config,
    write_adapter_config,
)
from earl_core.pretrained.huggingface import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    custom_object_save,
)
from earl_core.system.errors import ConfigError
from earl_core.tensors.errors import CheckpointError
from earl_core.tensors.safetensors_layout import open_file
from earl_core.weights.adapter import open_pairs
from earl_core.weights.load import model_files
from earl_core.weights.manifest import AdapterEntry

_CONFIG = "config.json"
_KINDS = frozenset(
    {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".spm", ".bpe", ".vocab", ".codes"}
)
"""Endings of files that are neither weights nor for people."""
_INDEX = ".index.json"
_LARGEST = 1 << 28
"""Largest file that is copied. No vocabulary is larger; weights in a format of their own are."""
_TEMPLATE = "chat_template.jinja"
_OTHERS = (_CONFIG, "run.json", "state.json")
"""Files that mark a folder as another model's, a run's or a training state's."""


def write_model_files(
    policy: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write all of a model directory but the weights into `policy`, which is empty.

    The model knows the directory that it was loaded from, and so does the tokenizer, whose chat
    template may be another one by now. The library writes the files of a model that was made in
    memory. Raises `ConfigError` for a file that cannot be copied, and the library's errors.
    """
    lying = _directory(model.config)
    if lying is None:
        _config_of(model).to_json_file(policy / _CONFIG)
        model.generation_config.to_json_file(policy / "generation_config.json")
    else:
        copy_model_files(lying, policy)
        _write(policy / _CONFIG, _merged(lying, policy, model))
    if model.is_remote_code():
        config = _config_of(model)
        custom_object_save(model, policy, config=config)
        lies = _read(policy / _CONFIG)
        mapped = lies.get("auto_map", {}) | config.auto_map
        _write(policy / _CONFIG, lies | {"auto_map": mapped})
    words = Path(tokenizer.name_or_path)
    if lying is None or words.resolve() != lying.resolve():
        tokenizer.save_pretrained(policy)
    else:
        _write_template(policy, tokenizer.chat_template, lying)


def _directory(config: Any) -> Path | None:
    """Return the directory that the model was loaded from; None: it was made in memory."""
    path = Path(str(getattr(config, "_name_or_path", "") or "-"))
    return path if (path / _CONFIG).is_file() else None


def copy_model_files(source: Path, policy: Path) -> None:
    """Copy all of a model directory but weights and what is for people alone. Raises `ConfigError`
    for a file that cannot be copied."""
    for path in _files(source):
        name = path.relative_to(source)
        known = path.suffix in _KINDS and not path.name.endswith(_INDEX)
        if not known or not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path}, which every checkpoint has a copy of, cannot be copied to {policy} "
                f"({error.strerror}): make it readable"
            ) from error
        (policy / name.parent).mkdir(parents=True, exist_ok=True)
        (policy / name).write_bytes(content)


def _files(source: Path) -> Iterator[Path]:
    """All that are not hidden, without other models in it: checkpoints of a trainer, and our runs,
    whose policies would otherwise be in the next one."""
    for folder, folders, names in os.walk(source):
        here = Path(folder)
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".")
            and not any((here / name / mark).exists() for mark in _OTHERS)
        ]
        yield from (here / name for name in sorted(names) if not name.startswith("."))


def _merged(source: Path, policy: Path, model: PreTrainedModel) -> dict[str, Any]:
    """The directory's `config.json` with what the learner has made of it."""
    lying, config = _read(source / _CONFIG), _config_of(model)
    if lying.get("model_type") != config.model_type:
        # The text model of a larger one has a configuration of its own.
        config.to_json_file(policy / _CONFIG)
        return _read(policy / _CONFIG)
    found, own = type(model.config).from_pretrained(source).to_dict(), config.to_dict()
    merged = _pinned(lying, found, own)
    merged.pop("torch_dtype", None)
    return merged | {"dtype": config.dtype, "architectures": config.architectures}


def _pinned(lying: dict[str, Any], found: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`lying` with `own`'s rotary settings where they are others than those read, `found`."""
    merged = dict(lying)
    for name, value in own.items():
        if name.startswith("rope"):
            if value != found.get(name):
                for older in ("rope_scaling", "rope_theta"):
                    merged.pop(older, None)
                merged[name] = value
        elif all(isinstance(each.get(name), dict) for each in (lying, found, own)):
            merged[name] = _pinned(lying[name], found[name], value)
    return merged


def _config_of(model: PreTrainedModel) -> Any:
    config: Any = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    return config


def _write_template(policy: Path, template: Any, source: Path) -> None:
    """The template in use, where it may be another than the files have. Several named ones are
    always those of the files."""
    known = source / _TEMPLATE
    if isinstance(template, str) and not (known.is_file() and known.read_text("utf-8") == template):
        (policy / _TEMPLATE).write_text(template, encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class PolicyFiles:
    """The policy of a model in a training state. adapter: the trained one; None: all of it is."""

    model: PreTrainedModel
    adapter: AdapterEntry | None = None

    @property
    def folder(self) -> str:
        """Name of the folder below the state's directory."""
        return ADAPTER_FOLDER if self.adapter else POLICY_FOLDER

    @property
    def stem(self) -> str:
        """Name of the files with the tensors, without its ending."""
        return PAIRS_FILE.partition(".")[0] if self.adapter else "model"

    @property
    def metadata(self) -> dict[str, str]:
        """What the headers of these files say besides."""
        noted = self.adapter.base_digest if self.adapter else ""
        return {"format": "pt"} | ({BASE_DIGEST: noted} if noted else {})

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that a state holds, by the model's names, tied ones once."""
        return pairs_of(self.model) if self.adapter else dict(self.model.named_parameters())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names in the files; buffers that `save_pretrained` writes are among
        a whole model's, and every rank holds those whole."""
        if self.adapter is not None:
            return {peft_name(name): each for name, each in self.trained.items()}
        return self.trained | _persistent_buffers(self.model)

    def write_others(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the folder with all files but those of the tensors."""
        folder = directory / self.folder
        folder.mkdir(parents=True)
        if self.adapter is None:
            write_model_files(folder, self.model, tokenizer)
            return
        base, adapter = str(self.model.config._name_or_path), self.adapter
        config = adapter_config(base, adapter.rank, adapter.alpha, adapter.targets)
        write_adapter_config(folder, config)

    def open(self, directory: Path) -> dict[str, torch.Tensor]:
        """The stored tensors of `trained`, mapped, by the model's names.

        Raises `CheckpointError` where one is missing or has another shape, `ConfigError` for an
        adapter of another base or other settings.
        """
        folder, wanted = directory / self.folder, self.trained
        if self.adapter is not None:
            said = AdapterConfig(rank=self.adapter.rank, alpha=self.adapter.alpha)
            check_source(said, folder)
            shapes = {peft_name(name): tuple(each.shape) for name, each in wanted.items()}
            pairs = open_pairs(folder, shapes, self.adapter.base_digest)
            return {name: pairs[peft_name(name)] for name in wanted}
        found = {n: t for path in model_files(folder) for n, t in open_file(path).items()}
        for name, tensor in wanted.items():
            if name not in found or found[name].shape != tensor.shape:
                raise CheckpointError(
                    f"The checkpoint {directory} lacks {name}, or holds it with another shape. "
                    "Resume from another checkpoint."
                )
        return found


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
