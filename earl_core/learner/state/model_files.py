"""Files of a saved policy beside its weights: those of its model directory, as they lie.

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
from pathlib import Path
from typing import Any

from earl_core.pretrained.huggingface import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    custom_object_save,
)
from earl_core.system.errors import ConfigError

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
    """`lying` with the rotary settings of `own` where they are others than those that were read,
    `found`."""
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
