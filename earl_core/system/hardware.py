"""What this host has: cores, memory, NVIDIA GPUs if the driver's tool is there; without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import NamedTuple

from earl_core.system.memory import memory_limit


@dataclass(frozen=True)
class HostResources:
    """A host's units, or what a run may use of them. cores: their numbers. gpus: how many; a rank
    then has one of its own. first_gpu: the index of the first, for a part of a machine.
    memory_bytes, gpu_memory_bytes (the least of all GPUs): 0 where nobody asked."""

    cores: tuple[int, ...]
    gpus: int = 0
    first_gpu: int = 0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    gpu_name: str = ""

    def part(self, number: int, parts: int) -> HostResources:
        """One of equal parts."""
        cores, gpus = len(self.cores) // parts, self.gpus // parts
        return replace(
            self,
            cores=self.cores[number * cores : (number + 1) * cores],
            gpus=gpus,
            first_gpu=self.first_gpu + number * gpus,
            memory_bytes=self.memory_bytes // parts,
        )


def read_resources() -> HostResources:
    """What this process may use.

    The memory is the least of the machine's and of the limits of all control groups around this
    process. GPUs that CUDA_VISIBLE_DEVICES hides do not count.
    """
    gpus = _visible(_read_gpus())
    return HostResources(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=len(gpus),
        memory_bytes=memory_limit(),
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        gpu_name=gpus[0].name if gpus else "",
    )


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
