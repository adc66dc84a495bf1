"""This host's hardware: cores, memory, NVIDIA GPUs that its driver knows; without torch."""

from __future__ import annotations

import math
import os
import platform
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from earl_core.system.control_groups import processor_limit
from earl_core.system.gpus import Gpu, visible_gpus
from earl_core.system.memory import memory_limit
from earl_core.system.processes import host_name


@dataclass(frozen=True)
class HostResources:
    """A host's units, or what a run may use of them.

    cores: their numbers; those next to the first GPUs first, so that equal parts of both lie close.
    gpus: how many; a rank then has one of its own. first_gpu: the index of the first, for a part of
    a machine. memory_bytes, gpu_memory_bytes (the least of all GPUs), nvlink_bandwidth and
    pcie_bandwidth (bytes/s, one way): 0 where nobody asked, or nobody told. nvlink_gpus,
    pcie_peers: as in `Links`. gpu_capability: the least compute capability of all GPUs, such as
    8.6; 0: not told. processor: its name. bf16: its instructions for bf16; empty: it names none.
    rdma_bandwidth: bytes/s, one way, of its network beside TCP; 0: it has none, or is a part.
    """

    cores: tuple[int, ...]
    gpus: int = 0
    first_gpu: int = 0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    gpu_name: str = ""
    nvlink_gpus: int = 0
    nvlink_bandwidth: float = 0.0
    pcie_bandwidth: float = 0.0
    pcie_peers: bool = True
    gpu_capability: float = 0.0
    processor: str = ""
    bf16: str = ""
    rdma_bandwidth: float = 0.0

    def part(self, number: int, parts: int) -> HostResources:
        """One of equal parts."""
        cores, gpus = len(self.cores) // parts, self.gpus // parts
        return replace(
            self,
            cores=self.cores[number * cores : (number + 1) * cores],
            gpus=gpus,
            first_gpu=self.first_gpu + number * gpus,
            memory_bytes=self.memory_bytes // parts,
            nvlink_gpus=min(self.nvlink_gpus, gpus),
            rdma_bandwidth=0.0,
        )


def read_resources() -> HostResources:
    """Read the resources that this process may use.

    The memory is the least of the machine's and of the limits of all control groups around this
    process. No more of the cores that it may run on count than these groups give it time of: more
    threads than that wait for each other. GPUs that CUDA_VISIBLE_DEVICES hides do not count. Raises
    `ConfigError` where the machine has GPUs and their driver cannot be asked.
    """
    gpus, links = visible_gpus()
    return HostResources(
        cores=_within_limit(_by_gpu(os.sched_getaffinity(0), gpus), bool(gpus)),
        gpus=len(gpus),
        memory_bytes=memory_limit(),
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        gpu_name=gpus[0].name if gpus else "",
        nvlink_gpus=links.nvlink_gpus,
        nvlink_bandwidth=links.nvlink_bandwidth,
        pcie_bandwidth=min((gpu.pcie_bandwidth for gpu in gpus), default=0.0),
        pcie_peers=links.pcie_peers,
        gpu_capability=min((gpu.capability for gpu in gpus), default=0.0),
        processor=processor_name(),
        bf16=bf16_instructions(),
        rdma_bandwidth=rdma_bandwidth(),
    )


def _by_gpu(cores: Iterable[int], gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """The cores next to the first GPU, then those next to later ones, then the others."""
    order = {core: number for number, gpu in reversed(list(enumerate(gpus))) for core in gpu.cores}
    return tuple(sorted(cores, key=lambda core: (order.get(core, len(gpus)), core)))


def _within_limit(cores: tuple[int, ...], gpus: bool) -> tuple[int, ...]:
    limit = processor_limit()
    if limit is None or limit >= len(cores):
        return cores
    # Containers of one machine all see the same cores: not all of them are to take the first.
    first = 0 if gpus else zlib.crc32(host_name().encode()) % len(cores)
    return tuple(sorted((cores + cores)[first : first + max(1, math.ceil(limit))]))


_INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    # Arm's name of them; no x86 processor has a flag of this name.
    "bf16": "Arm's BF16 instructions",
}
"""Flags of processors that multiply bf16 faster than float32, the fastest first."""

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Variables that keep torch from using what there is."""


def processor_name(root: Path = Path("/")) -> str:
    """The name of the first core; where the kernel does not say, the kind of its instructions."""
    names = _values(root, "model name", "CPU part")
    return names[0] if names else platform.machine()


def bf16_instructions(root: Path = Path("/")) -> str:
    """Name the instructions for bf16 that all cores have and torch may use, such as `AVX-512 BF16`;
    empty for none, or where the kernel does not say: then only measuring tells its speed."""
    flags = [set(line.split()) for line in _values(root, "flags", "Features")]
    if not flags or instruction_limit():
        return ""
    common = set.intersection(*flags)
    return next((name for flag, name in _INSTRUCTIONS.items() if flag in common), "")


def rdma_bandwidth(root: Path = Path("/")) -> float:
    """Return the bytes/s, one way, that the active ports of InfiniBand and RoCE devices carry
    together by what their drivers say, such as `100 Gb/sec (4X EDR)`; 0: there are none."""
    total = 0.0
    for port in root.glob("sys/class/infiniband/*/ports/*"):
        with suppress(OSError, ValueError, IndexError):
            if "ACTIVE" in (port / "state").read_text().split():
                rate = float((port / "rate").read_text().split()[0])
                total += rate * 1e9 / 8 if 0 < rate < math.inf else 0.0
    return total


def instruction_limit() -> str:
    """Return the limits that the environment sets on torch's instructions; empty: none."""
    return " ".join(os.environ.get(name, "") for name in _LIMITS).strip()


def _values(root: Path, *keys: str) -> list[str]:
    """List the values of these keys over all cores; none where the kernel has no such file."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":")[::2] for line in lines)
    return [value.strip() for key, value in pairs if key.strip() in keys]
