"""Formulas that hold only on a host without GPUs, whose cores share one memory."""

from __future__ import annotations

from earl_core.config.rollout import VllmConfig
from earl_core.deployment.shapes import DeviceFigures, Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.memory import Memory
from earl_core.selector.model.memory_model import MemoryModel, gib
from earl_core.selector.model.sizes import powers

_RUNTIME_BYTES = 0.3 * 2**30
"""Libraries of a process that computes on a CPU, measured; other processes share a part of it."""

_ENGINE_BYTES = 0.57 * 2**30
"""The same for a process with an engine."""

_VLLM_BYTES = 0.83 * 2**30
"""The same for each of vLLM's processes on a CPU: two for an engine and one for each rank."""

_UNDER_WAY = 2.3, 4.0
"""Layers' worth of intermediate results and of blocks that the C library's allocator keeps, and
bytes for each number of the embedding: the two constants of the update that are measured."""

_LOGIT_BYTES = 12
"""Bytes of a logit: a product of 16 bits is made in these first, and then copied."""

_SHORT_TOKENS = 128
"""Samples up to this length have their attention scores stored on a CPU."""

_CORE_FLOPS, _HOST_BANDWIDTH = 100e9, 40e9
"""Figures where nobody measured: one vector unit of a server core, two channels of memory."""

_LAYER_SECONDS = 0.2e-3
"""Least seconds of a pass through a decoder layer, however small: the operations of torch, measured
on one core of an AMD EPYC (`earl_core.tensors.device_speed`)."""


def figures(hardware: Hardware) -> DeviceFigures:
    """Figures of one core and its share of the memory: measured with all cores, or guessed."""
    cores, host = hardware.cpu_cores, hardware.figures
    if host is not None:
        shared = {
            name: getattr(host, name) / cores
            for name in ("flops", "float32_flops", "memory_bandwidth")
        }
        # A core reads what another wrote: a message is copied twice.
        link = {"link_bandwidth": host.memory_bandwidth / 4, "peer_bandwidth": 0.0}
        memory = {"memory_bytes": max(1, hardware.memory_bytes // cores)}
        own = {"name": "CPU core", "nvlink_gpus": 0}
        return host.model_copy(update=shared | link | memory | own)
    return DeviceFigures(
        name="CPU core",
        nccl=False,
        memory_bytes=max(1, hardware.memory_bytes // cores),
        flops=_CORE_FLOPS,
        memory_bandwidth=_HOST_BANDWIDTH / cores,
        link_bandwidth=_HOST_BANDWIDTH / 4,
        host_bandwidth=_HOST_BANDWIDTH,
        layer_seconds=_LAYER_SECONDS,
        source="a guess: no data sheet",
    )


def engines(degree: int, hardware: Hardware) -> list[tuple[int, int]]:
    """Numbers of engines that fill the host, and the threads of each of their ranks."""
    most = hardware.cpu_cores // degree
    counts = [count for count in powers(most) if most % count == 0]
    return [(count, hardware.cpu_cores // (count * degree)) for count in counts]


def mesh(stage: str, hardware: Hardware) -> StageDeployment:
    """One rank with all cores: the only one that is offered."""
    return StageDeployment(stage, threads=hardware.cpu_cores)


class CpuMemoryModel(MemoryModel):
    """The memory of one process, counted with every tensor that autograd keeps there."""

    shared = True
    outside = 0.0
    runtime, engine_runtime = _RUNTIME_BYTES, _ENGINE_BYTES
    under_way, logit_bytes = _UNDER_WAY, _LOGIT_BYTES

    def budget(self, fraction: float, reserved: float) -> float:
        return max(1.0, fraction * self.hardware.memory_bytes - reserved)

    def short_of(self, peak: float, budget: float, reserved: float) -> str:
        host = f"this host of {gib(self.hardware.memory_bytes)}"
        text = f"needs {gib(peak)}, but only {gib(budget)} are available on {host}"
        return text + (f" ({gib(reserved)} are used by other processes)" if reserved else "")

    def score_bytes(self, longest: float) -> float:
        """Short samples' attention stores its scores, and is computed in float32."""
        return 0.0 if longest > _SHORT_TOKENS else 4 * self.shape.attention_heads * longest

    def _with_cache(self, fixed: Memory, candidate: StageDeployment, vllm: VllmConfig) -> Memory:
        runtime = _VLLM_BYTES * (1 + 2 / candidate.tensor_parallel)
        return fixed._replace(runtime=runtime, kv_cache=(vllm.kv_cache_gib or 2) * 2.0**30)
