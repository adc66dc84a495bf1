"""What this host and the model's configuration file say, without importing torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from earl_core.config import ConfigError
from earl_core.selector import Hardware, ModelShape


class _Group(NamedTuple):
    """A control group that limits this process: its directory, its limit in bytes, its version."""

    directory: Path
    limit: int
    version: int


def read_hardware() -> Hardware:
    """Cores and memory this process may use, and NVIDIA GPUs if the driver's tool is there.

    The memory is the least of the machine's and of the limits of all control groups around this
    process. GPUs that CUDA_VISIBLE_DEVICES hides do not count.
    """
    gpus = _visible(_read_gpus())
    return Hardware(
        cpu_cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_limit(),
        gpus=len(gpus),
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        gpu_name=gpus[0].name if gpus else "",
    )


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process and all that share its limits may use. root: where the file systems
    `proc` and `sys` are."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(group.limit for group in _memory_groups(root))])


def memory_in_use(root: Path = Path("/")) -> int:
    """Bytes of `memory_limit` that are in use now, page cache that can be dropped left out."""
    groups = _memory_groups(root)
    tightest = min(groups, key=lambda group: group.limit, default=None)
    memory = psutil.virtual_memory()
    if tightest is None or tightest.limit >= memory.total:
        return int(memory.total - memory.available)
    used = _number(tightest.directory / _USAGE[tightest.version]) or 0
    return max(0, used - _droppable(tightest))


_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}


def _memory_groups(root: Path) -> list[_Group]:
    """The process's memory control group and its ancestors, as far as they have a limit."""
    found = []
    for version, mount, inside in _memory_mounts(root):
        # In a container the own group's path may not exist below the mount, which then is the
        # container's own group.
        top = root / mount.relative_to("/")
        directory = top / inside
        if ".." in directory.parts or not directory.is_dir():
            directory = top
        while True:
            limit = _number(directory / _LIMIT[version])
            if limit is not None:
                found.append(_Group(directory, limit, version))
            if directory == top:
                break
            directory = directory.parent
    return found


def _memory_mounts(root: Path) -> list[tuple[int, Path, str]]:
    """(version, mount point, this process's path below it) of each hierarchy that counts memory."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        own = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = {}
    for line in own:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    found = []
    for line in mounts:
        fields, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        top, point = fields.split(" ")[3:5]
        version = {"cgroup": 1, "cgroup2": 2}.get(kind, 0)
        if version not in paths or (version == 1 and "memory" not in options.split(",")):
            continue
        path = paths[version]
        inside = path.removeprefix(top.rstrip("/")) if path.startswith(top) else path
        found.append((version, Path(point), inside.lstrip("/")))
    return found


def _number(path: Path) -> int | None:
    """The file's number; None for `max`, or where there is no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _droppable(group: _Group) -> int:
    """Bytes of files that the kernel may drop; shared memory is none of them."""
    try:
        lines = (group.directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    prefix = "total_" if group.version == 1 else ""
    return sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


class _Gpu(NamedTuple):
    uuid: str
    name: str
    memory_bytes: int


def _read_gpus() -> list[_Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in found.stdout.splitlines():
        if line.count(",") >= 2:
            uuid, _, rest = line.partition(",")
            name, _, size = rest.rpartition(",")
            gpus.append(_Gpu(uuid.strip(), name.strip(), int(size) * 2**20))
    return gpus


def _visible(gpus: list[_Gpu]) -> list[_Gpu]:
    """Those that CUDA shows to this process: the first entry that names none ends the list."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    seen: list[_Gpu] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdigit():
            named = gpus[int(entry) : int(entry) + 1]
        else:
            named = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        seen += named
    return seen


def read_model_shape(directory: Path) -> ModelShape:
    """The numbers of `config.json`, under the names that Llama-, Qwen- and GPT-2-like models use.

    Raises `ConfigError` when the directory is not a model or its configuration lacks a number.
    """
    try:
        raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    except OSError as error:
        raise ConfigError(
            f"model.path {str(directory)!r} is not a model directory (no config.json): prepare "
            "the model first, or give model.builder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{directory / 'config.json'} is not valid JSON: {error}") from error
    try:
        return ModelShape.from_config(raw)
    except ValueError as error:
        raise ConfigError(f"{directory / 'config.json'} cannot be used: {error}") from error
