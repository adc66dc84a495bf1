"""What is other on a host without GPUs, whose cores share one memory: the only formulas of it."""

from __future__ import annotations

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.config.rollout import VllmConfig
from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.selector.model.memory_model import (
    Memory,
    MemoryModel,
    gib,
    norm_bytes,
    selective_layer_bytes,
)
from earl_core.selector.model.sizes import powers

_RUNTIME_BYTES = 0.52 * 2**30
"""Libraries of a process that computes on a CPU, measured; other processes share a part of it."""

_ENGINE_BYTES = 0.57 * 2**30
"""The same for a process with an engine."""

_VLLM_BYTES = 0.83 * 2**30
"""The same for each of vLLM's processes on a CPU: two for an engine and one for each rank."""

_SHORT_TOKENS = 128
"""Samples up to this length have their attention scores stored on a CPU."""

_CORE_FLOPS, _HOST_BANDWIDTH = 100e9, 40e9

_LAYER_SECONDS = 0.2e-3
"""Least seconds of a pass through a decoder layer, however small: the operations of torch, measured
on one core of an AMD EPYC (`earl_core.tensors.device_speed`)."""


def figures(hardware: Hardware) -> DeviceFigures:
    """Of one core, with its share of the memory. No data sheet stands behind them: one vector unit
    of a server core, two channels of memory."""
    cores = hardware.cpu_cores
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
    """Of one process, counted with every tensor that autograd keeps there."""

    shared = True
    runtime, engine_runtime = _RUNTIME_BYTES, _ENGINE_BYTES

    def budget(self, fraction: float, reserved: float) -> float:
        return max(1.0, fraction * self.hardware.memory_bytes - reserved)

    def short_of(self, peak: float, budget: float, reserved: float) -> str:
        host = f"this host of {gib(self.hardware.memory_bytes)}"
        text = f"needs {gib(peak)}, but only {gib(budget)} are available on {host}"
        return text + (f" ({gib(reserved)} are used by other processes)" if reserved else "")

    def _kept(self, candidate: StageDeployment, longest: float, mixed: bool) -> tuple[float, float]:
        """Between layers stand residual sums in float32. How many layers' worth of gradients and
        intermediate results are under way besides is measured, with a layer that is computed again
        and without: the only constants here that are not counted."""
        per_layer = layer_activation_bytes(self.shape, longest, mixed)
        if candidate.activation_checkpointing == "selective":
            kept = self.shape.layers * selective_layer_bytes(self.shape, mixed=mixed)
            return kept + (2.5 if mixed else 1.5) * per_layer, 0.0
        if candidate.activation_checkpointing == "full":
            between = 4 * self.shape.layers * self.shape.hidden_size
            return between + (3.5 if mixed else 4.0) * per_layer, 0.0
        return (self.shape.layers + (2.5 if mixed else 1.5)) * per_layer, 0.0

    def _scored(self, candidate: StageDeployment, mixed: bool) -> float:
        """Sums, norms and what the matrices read; queries and keys before and after they are
        turned; four feed-forward products."""
        shape, value = self.shape, 2 if mixed else 4
        wide = shape.query_size + shape.key_value_size
        return 26 * shape.hidden_size + 8 * wide + 4 * shape.feed_forward * value

    def _logits(self, width: float, rows: float, several: bool, backward: bool) -> float:
        """The head's gradient, in the dtype of its product and in float32. With several chunks this
        is more than the learner takes, which adds them up in place; calibration brings it down."""
        if not backward:
            return 12 * rows * width
        return 8 * rows * width + width * self.shape.hidden_size * (20 if several else 7)

    def _with_cache(self, fixed: Memory, candidate: StageDeployment, vllm: VllmConfig) -> Memory:
        runtime = _VLLM_BYTES * (1 + 2 / candidate.tensor_parallel)
        return fixed._replace(runtime=runtime, kv_cache=(vllm.kv_cache_gib or 2) * 2.0**30)


def layer_activation_bytes(shape: ModelShape, longest: float, mixed: bool = True) -> float:
    """As `memory_model.layer_activation_bytes`, with what a CPU's attention kernels keep. longest:
    of a sample, tokens."""
    value = 2 if mixed else 4
    wide = shape.query_size + shape.key_value_size
    if longest <= _SHORT_TOKENS:
        attention = 4 * (wide + shape.key_value_size) + 4 * shape.attention_heads * longest
    else:
        attention = 2 * value * wide + 4 * shape.attention_heads
    products = (4 if shape.gated_mlp else 2) * shape.feed_forward * value
    return norm_bytes(shape, mixed) + attention + value * shape.query_size + products
