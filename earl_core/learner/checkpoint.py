"""Training states on disk: `policy/`, `optimizer.safetensors`, `optimizer.json`, `state.json`.

`policy/` is a directory that `from_pretrained` loads, tokenizer included. Optimizer tensors are
named by their parameter, so that a state loads under any order of parameters. `state.json` is
written last; it lists every other file with its size and xxh3 checksum, and every parameter with
its shape. Safetensors and JSON only.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = "earl-training-state-1"


class CheckpointError(RuntimeError):
    """A training state that is incomplete, damaged, or of another model."""


def write_training_state(
    directory: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    """Write a training state, or nothing: all files go to a sibling, which is then renamed.

    directory must not exist or must be a training state, which is replaced. state: JSON-able
    things of the caller, such as the policy version. Raises OSError when the disk is full, with
    nothing left behind.
    """
    for stale in directory.parent.glob(f".{directory.name}.*"):
        shutil.rmtree(stale)  # of a process that was killed while it wrote
    building = directory.parent / f".{directory.name}.building"
    building.mkdir(parents=True)
    try:
        model.save_pretrained(building / "policy")
        tokenizer.save_pretrained(building / "policy")
        _write_optimizer(building, model, optimizer)
        files = {
            str(path.relative_to(building)): {"bytes": path.stat().st_size, "xxh3": _digest(path)}
            for path in sorted(building.rglob("*"))
            if path.is_file()
        }
        content = {"format": FORMAT, "state": state, "parameters": _shapes(model), "files": files}
        (building / "state.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        for path in [*building.rglob("*"), building]:
            _sync(path)
        if directory.exists():
            # A rename cannot replace a directory that has content.
            retired = directory.parent / f".{directory.name}.retired"
            directory.rename(retired)
            building.rename(directory)
            shutil.rmtree(retired)
        else:
            building.rename(directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def verify_training_state(directory: Path) -> dict[str, Any]:
    """Check the sizes and checksums of all files; returns the caller's `state`.

    Raises CheckpointError for a missing, damaged or foreign file.
    """
    return cast(dict[str, Any], _verified(directory)["state"])


def read_training_state(
    directory: Path, *, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Load weights and optimizer state in place, bit for bit; returns the caller's `state`.

    Raises CheckpointError, before anything is changed, when a file is damaged or when the state
    belongs to a model with other parameters.
    """
    content = _verified(directory)
    _check_same_model(directory, content["parameters"], _shapes(model))
    index = _optimizer_index(directory)
    loaded = type(model).from_pretrained(
        directory / "policy",
        dtype=torch.float32,
        local_files_only=True,
        attn_implementation=model.config._attn_implementation,
    )
    weights = dict(loaded.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    _read_optimizer(directory, index, model, optimizer)
    return cast(dict[str, Any], content["state"])


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _check_same_model(
    directory: Path, stored: dict[str, list[int]], wanted: dict[str, list[int]]
) -> None:
    if stored == wanted:
        return
    different = sorted(
        name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name)
    )
    example = different[0]
    raise CheckpointError(
        f"The checkpoint {directory} is of another model: {len(different)} parameters differ, "
        f"such as {example} with shape {stored.get(example, 'missing')} there and "
        f"{wanted.get(example, 'missing')} here. Set model.path to the model that the run was "
        "started with, or start a new run."
    )


def _write_optimizer(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tensors: dict[str, torch.Tensor] = {}
    index: dict[str, dict[str, str]] = {}
    for name, parameter in model.named_parameters():
        entries = optimizer.state.get(parameter, {})
        for key, value in sorted(entries.items()):
            tensors[f"{name}/{key}"] = value.detach().contiguous()
            index.setdefault(name, {})[key] = f"{name}/{key}"
    save_file(tensors, directory / "optimizer.safetensors")
    (directory / "optimizer.json").write_text(
        json.dumps({"algorithm": "AdamW", "parameters": index}, indent=1), encoding="utf-8"
    )


def _optimizer_index(directory: Path) -> dict[str, dict[str, str]]:
    content = json.loads((directory / "optimizer.json").read_text(encoding="utf-8"))
    return cast(dict[str, dict[str, str]], content["parameters"])


def _read_optimizer(
    directory: Path,
    index: dict[str, dict[str, str]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    optimizer.state.clear()
    with safe_open(directory / "optimizer.safetensors", framework="pt") as tensors:
        for name, parameter in model.named_parameters():
            if name not in index:
                continue
            # AdamW keeps the step counter on the CPU unless the fused kernel runs on a device.
            optimizer.state[parameter] = {
                key: tensors.get_tensor(place).to(parameter.device)
                for key, place in index[name].items()
            }


def _verified(directory: Path) -> dict[str, Any]:
    try:
        content = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} is no complete checkpoint: it has no state.json. Resume from another."
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{directory}/state.json is damaged ({error}). Resume from another checkpoint."
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} is no training state of format {FORMAT}. Resume from another checkpoint."
        )
    for name, expected in content["files"].items():
        path = directory / name
        inside = path.resolve().is_relative_to(directory.resolve())
        size = path.stat().st_size if inside and path.is_file() else None
        if size != expected["bytes"] or _digest(path) != expected["xxh3"]:
            raise CheckpointError(
                f"The checkpoint {directory} is damaged: {name} is missing or not what was "
                "written. Resume from another checkpoint."
            )
    return content


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
