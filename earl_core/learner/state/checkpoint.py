"""Training states on disk: `policy/` or `adapter/`, `optimizer.safetensors`, `state.json`.

`policy/` is a directory that `from_pretrained` loads, tokenizer included. `adapter/` is one in
PEFT's format, of a model that is not copied. Files hold whole tensors,
which all ranks of a mesh fill together, each the boxes it holds, so that a state written under one
mesh loads under any other. Where the ranks are on several hosts, each host writes one file of
weights and one of the optimizer's tensors, beside an index, as Hugging Face splits large models.
Optimizer tensors are named `parameter/key`. `state.json` is written last and describes the rest
(`earl_core.run.checkpoints`). Safetensors and JSON only.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from earl_core.learner.state.model_files import PolicyFiles
from earl_core.learner.state.optimizer import PolicyOptimizer, State
from earl_core.pretrained.huggingface import PreTrainedModel, PreTrainedTokenizerBase
from earl_core.run.checkpoints import describe_state, file_checksum, read_state, verify_files
from earl_core.system.errors import ConfigError
from earl_core.system.files import remove, sync
from earl_core.system.storage_errors import NotWritten, naming
from earl_core.tensors.collectives import Ranks
from earl_core.tensors.errors import CheckpointError
from earl_core.tensors.joint_file import own_shares, write_shares
from earl_core.tensors.safetensors_layout import (
    DTYPE_CODES,
    DTYPES,
    FileLayout,
    open_file,
    plan_layout,
)
from earl_core.tensors.slices import Slice, local_box, local_part, slices_like, slices_of
from earl_core.weights.load import tensor_files
from earl_core.weights.manifest import AdapterEntry

if TYPE_CHECKING:
    from earl_core.learner.parallel.mesh import UpdateMesh


def write_training_state(
    directory: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: PolicyOptimizer,
    state: dict[str, Any],
    mesh: UpdateMesh | None = None,
    adapter: AdapterEntry | None = None,
) -> None:
    """Write a training state, or nothing: all files go to a sibling, which is then renamed.

    directory must not exist or must be a training state, which is replaced. state: JSON-able
    things of the caller, such as the policy version; rank 0's counts. adapter: the one that alone
    is trained, and written. With a mesh all its ranks
    call it, and all must see the directory. Raises OSError on all ranks when the disk is full,
    with nothing left behind.
    """
    ranks = Ranks(mesh)
    building = directory.parent / f".{directory.name}.building"
    gather_nothing(model)
    files = PolicyFiles(model, adapter)
    parameters = files.trained
    try:
        ranks.on_first(lambda: _begin(directory, building, files, tokenizer))
        weights = ranks.do(lambda: slices_of(files.tensors()))
        written = _write_tensors(building / files.folder, files.stem, weights, ranks, files)
        known = {f"{files.folder}/{name}": checksum for name, checksum in written.items()}
        moments = ranks.do(lambda: _optimizer_slices(parameters, optimizer))
        known |= _write_tensors(building, "optimizer", moments, ranks)
        ranks.on_first(lambda: _seal(directory, building, _shapes(parameters), state, known))
    except BaseException:
        if ranks.first:
            shutil.rmtree(building, ignore_errors=True)
        raise


def read_training_state(
    directory: Path,
    *,
    model: PreTrainedModel,
    optimizer: PolicyOptimizer,
    mesh: UpdateMesh | None = None,
    adapter: AdapterEntry | None = None,
) -> dict[str, Any]:
    """Load weights and optimizer state in place, bit for bit; returns the caller's `state`.

    Each rank reads the boxes that it holds, whatever mesh wrote them. Raises CheckpointError, on
    all ranks and before anything is changed, when a file is damaged or when the state belongs to
    a model with other parameters, and ConfigError when an adapter has another base.
    """
    ranks = Ranks(mesh)
    gather_nothing(model)
    files = PolicyFiles(model, adapter)
    parameters = files.trained
    content = _verified(directory, ranks)
    _check_same_model(directory, content["parameters"], _shapes(parameters))
    weights = ranks.do(lambda: files.open(directory))
    moments = ranks.do(lambda: _moments(directory))
    ranks.do(lambda: _load(parameters, weights, optimizer, moments))
    return cast(dict[str, Any], content["state"])


def try_training_state(
    parent: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mesh: UpdateMesh | None = None,
    adapter: AdapterEntry | None = None,
) -> None:
    """Write what `write_training_state` will write below `parent`, but no tensors, and remove it.
    Raises `ConfigError` without room for one state, and what writing it raises. Collective."""
    ranks = Ranks(mesh)
    files = PolicyFiles(model, adapter)
    weights = sum(each.numel() * each.element_size() for each in files.trained.values())

    def try_it() -> None:
        building = parent / ".rehearsal.building"
        try:
            _begin(parent / "rehearsal", building, files, tokenizer)
            _require_room(parent, _STATES * weights)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    ranks.on_first(try_it)


_STATES = 3
"""Weights and two moments."""


def _require_room(parent: Path, size: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < size:
        raise ConfigError(
            f"a checkpoint needs {size:,} bytes, and {parent} has {free:,} left: free space there, "
            "keep fewer with checkpoint.keep_last, or choose another runs_directory"
        )


def gather_nothing(model: nn.Module) -> None:
    """Free what FSDP2 has gathered, so that parameters are the parts that this rank owns."""
    for module in model.modules():
        if hasattr(module, "unshard") and hasattr(module, "reshard"):
            cast(Any, module).reshard()


def _shapes(parameters: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in parameters.items()}


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


def _begin(
    directory: Path, building: Path, files: PolicyFiles, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The new directory with all that one rank knows: configuration and tokenizer."""
    with naming(directory):
        for stale in directory.parent.glob(f".{directory.name}.*"):
            remove(stale)  # of a process that was killed while it wrote
        files.write_others(building, tokenizer)


def _write_tensors(
    directory: Path,
    stem: str,
    slices: Sequence[Slice],
    ranks: Ranks,
    policy: PolicyFiles | None = None,
) -> dict[str, str]:
    """Whole tensors, each in its own dtype: `stem.safetensors`, or a file of each host and an
    index, which adapters have none of. Each host's ranks fill its file, with what others send them,
    because a network file system need not let two hosts write one. The files' checksums by name.
    Collective."""
    plan = ranks.from_first(
        lambda: [(each.name, DTYPE_CODES[each.tensor.dtype], each.shape) for each in slices]
    )
    tensors = {name: (DTYPES[code], tuple(shape)) for name, code, shape in plan}
    hosts = list(dict.fromkeys(ranks.hosts))
    if policy is not None and policy.adapter is not None:
        del hosts[1:]
    writers = _dealt(tensors, hosts)
    metadata = _METADATA if policy is None else policy.metadata
    layouts = [
        plan_layout({name: tensors[name] for name in tensors if writers[name] == host}, metadata)
        for host in hosts
    ]
    places = {name: place for layout in layouts for name, place in layout.places.items()}
    parts = own_shares(slices, places, ranks, writers=writers)
    names = dict(zip(hosts, _file_names(stem, len(hosts)), strict=True))
    host = ranks.hosts[ranks.rank]
    leader = host in names and ranks.hosts.index(host) == ranks.rank
    path = directory / names.get(host, "")
    ranks.do(lambda: _allocate(path, layouts[hosts.index(host)]) if leader else None)

    def write() -> None:
        if host not in names:
            write_shares(memoryview(b""), places, slices, parts, ranks)
            return
        with naming(path), path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), layouts[hosts.index(host)].total_bytes)
        write_shares(mapping, places, slices, parts, ranks)
        mapping.flush()

    ranks.do(write)
    if len(hosts) > 1:
        files = {name: names[writer] for name, writer in writers.items()}
        index = {
            "metadata": {"total_size": sum(each.stop - each.start for each in places.values())},
            "weight_map": files,
        }
        text = json.dumps(index, indent=1)
        ranks.on_first(lambda: _write_text(directory / f"{stem}.safetensors.index.json", text))
    # Its host has just written it; another would read it through the network.
    checksums = ranks.do(lambda: {names[host]: file_checksum(path)} if leader else {})
    return {name: value for each in ranks.gather_json(checksums) for name, value in each.items()}


_METADATA = {"format": "pt"}


def _dealt(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], hosts: Sequence[str]
) -> dict[str, str]:
    """A host for each tensor, in the tensors' order: equally many bytes for each host."""
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in tensors.items()}
    loads = dict.fromkeys(hosts, 0)
    writers = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        writers[name] = min(loads, key=lambda host: loads[host])
        loads[writers[name]] += sizes[name]
    return {name: writers[name] for name in tensors}


def _file_names(stem: str, count: int) -> list[str]:
    """Name the files as transformers names them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def _write_text(path: Path, text: str) -> None:
    with naming(path):
        path.write_text(text, encoding="utf-8")


def _allocate(path: Path, layout: FileLayout) -> None:
    with naming(path), path.open("xb") as file:
        try:
            # Writing through a mapping on a full disk would be SIGBUS instead of an error.
            os.posix_fallocate(file.fileno(), 0, layout.total_bytes)
        except OSError as error:
            raise NotWritten(
                error.errno,
                f"no room for {layout.total_bytes:,} bytes of a checkpoint in {path.parent} "
                f"({error.strerror})",
                remedy="free space there, or keep fewer with checkpoint.keep_last",
            ) from error
        file.write(layout.prefix)


def _optimizer_slices(
    parameters: Mapping[str, torch.Tensor], optimizer: PolicyOptimizer
) -> list[Slice]:
    state = optimizer.state
    parts = [
        (name, f"{name}/{key}", tensor)
        for name in parameters
        for key, tensor in sorted(state.get(name, {}).items())
    ]
    return slices_like(parameters, parts)


def _seal(
    directory: Path,
    building: Path,
    shapes: dict[str, list[int]],
    state: dict[str, Any],
    known: dict[str, str],
) -> None:
    with naming(directory):
        describe_state(building, state, shapes, known)
        for path in [*building.rglob("*"), building]:
            sync(path)
    if os.path.lexists(directory):
        # A rename cannot replace a directory that has content.
        retired = directory.parent / f".{directory.name}.retired"
        directory.rename(retired)
        building.rename(directory)
        remove(retired)
    else:
        building.rename(directory)
    sync(directory.parent)


def _moments(directory: Path) -> dict[str, State]:
    """The stored optimizer state by parameter name, mapped."""
    moments: dict[str, State] = {}
    for path in tensor_files(directory, "optimizer"):
        for place, tensor in open_file(path).items():
            name, _, key = place.rpartition("/")
            moments.setdefault(name, {})[key] = tensor
    return moments


@torch.no_grad()
def _load(
    parameters: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    optimizer: PolicyOptimizer,
    moments: Mapping[str, State],
) -> None:
    optimizer.state.clear()
    for name, parameter in parameters.items():
        box = local_box(parameter)
        if box.numel:
            local_part(parameter).copy_(weights[name][box.index])
        tensors = {}
        for key, stored in moments.get(name, {}).items():
            cut = stored.shape == parameter.shape
            tensors[key] = (stored[box.index] if cut else stored).clone()
        if tensors:
            optimizer.load_state(name, tensors)


def _verified(directory: Path, ranks: Ranks) -> dict[str, Any]:
    """The content of `state.json`, after all files were checked, each by one rank. Collective."""
    content = ranks.do(lambda: read_state(directory))
    files = sorted(content["files"].items())
    ranks.do(lambda: verify_files(directory, files[ranks.rank :: ranks.size]))
    return content
