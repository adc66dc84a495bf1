"""What this host and the model's configuration file say, without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import NamedTuple

from earl_core.deployment.shapes import Hardware
from earl_core.system.cgroups import memory_limit


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
