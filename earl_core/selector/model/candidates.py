"""The stage deployments that hardware and model allow, with a sentence for each degree that they do
not; well-known model shapes, and devices with the figures of their data sheets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.deployment.feasibility import tensor_problem
from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.selector.model import cpu
from earl_core.selector.model.memory_model import MemoryModel
from earl_core.selector.model.sizes import divisors, powers

Offers = tuple[list[StageDeployment], list["RuledOut"]]
"""Candidates, and what is none."""


class RuledOut(NamedTuple):
    """A candidate, or a whole family of them, that is not offered, and why, in a sentence."""

    stage: str
    label: str
    reason: str


def candidate_of(deployment: StageDeployment, hardware: Hardware) -> StageDeployment:
    """What of a stage deployment is a choice: on GPUs threads are none, and never the context that
    engines are built for."""
    threads = 1 if hardware.gpus else deployment.threads
    return deployment._replace(threads=threads, max_model_len=0)


def deployed(candidate: StageDeployment, hardware: Hardware) -> StageDeployment:
    """The candidate as worker groups follow it: on GPUs with the threads for what a rank does
    beside its device."""
    if not hardware.gpus:
        return candidate
    return candidate._replace(threads=max(1, hardware.cpu_cores // hardware.devices_per_host))


def _tensor_degrees(
    stage: str, shape: ModelShape, hardware: Hardware, allowed: tuple[int, ...] = ()
) -> tuple[list[int], list[RuledOut]]:
    """Tensor-parallel degrees of a stage. allowed: those asked for; none means all."""
    kept, out = [], []
    for degree in sorted(set(powers(hardware.devices)) | set(allowed)):
        problem = tensor_problem(shape, degree, engine=stage == "rollout")
        if allowed and degree not in allowed:
            listed = ", ".join(map(str, allowed))
            problem = f"selector.tensor_parallel or the engine allows only {listed}"
        elif degree > hardware.devices:
            problem = f"there are only {hardware.devices} devices"
        elif not problem and degree > hardware.devices_per_host:
            problem = (
                "its all-reduces, two a layer and token, would leave the host, which has "
                f"{hardware.devices_per_host} devices"
            )
        if problem:
            out.append(RuledOut(stage, f"TP {degree}", problem))
        else:
            kept.append(degree)
    return kept, out


def rollout_candidates(
    shape: ModelShape,
    hardware: Hardware,
    episodes: int,
    running: int,
    allowed: tuple[int, ...] = (),
) -> Offers:
    """Engines that fill the hardware, for each degree. running: most sequences of an engine."""
    degrees, out = _tensor_degrees("rollout", shape, hardware, allowed)
    made = []
    for degree in degrees:
        for replicas, threads in _engines(degree, hardware):
            if 1 < replicas > episodes:
                reason = f"{replicas} engines for {episodes} episodes: some would stand idle"
                out.append(RuledOut("rollout", f"TP {degree} x {replicas}", reason))
            else:
                engines = StageDeployment("rollout", replicas, degree, threads=threads)
                made.append(engines._replace(max_running_requests=running))
    # Fewer episodes than engines at every degree: one engine a sequence is the most there is.
    return made or [
        StageDeployment("rollout", max(1, episodes), degree, max_running_requests=running)
        for degree in degrees
    ], out


def _engines(degree: int, hardware: Hardware) -> list[tuple[int, int]]:
    """Numbers of engines that fill the hardware, and the threads of each device."""
    if hardware.gpus:
        return [(max(1, hardware.gpus // degree), 1)]
    return cpu.engines(degree, hardware)


def training_candidates(
    stage: str, shape: ModelShape, hardware: Hardware, episodes: int, microbatch: int
) -> Offers:
    """Meshes of replicas x shard x context x tensor parallel ranks that fill the hardware.

    Checkpointing, chunked logits and offload are steps of the memory fallback (`fallbacks`).
    """
    if not hardware.gpus:
        return [cpu.mesh(stage, hardware)._replace(max_tokens_per_microbatch=microbatch)], []
    degrees, out = _tensor_degrees(stage, shape, hardware)
    made = []
    for tensor in degrees:
        for context in powers(hardware.devices // tensor):
            parallel, rest = divmod(hardware.devices, tensor * context)
            if rest:
                continue
            reason = ""
            if shape.attention_heads % (tensor * context):
                reason = (
                    f"{tensor * context} ranks do not divide the {shape.attention_heads} heads, "
                    "which context parallelism spreads over them"
                )
            elif parallel > episodes:
                reason = (
                    f"{parallel} data-parallel replicas for {episodes} episodes: some would stand "
                    "idle"
                )
            if reason:
                out.append(RuledOut(stage, f"TP {tensor}, CP {context}", reason))
                continue
            for shard in divisors(parallel):
                mesh = StageDeployment(stage, parallel // shard, tensor, context, shard)
                made.append(mesh._replace(max_tokens_per_microbatch=microbatch))
    return made, out


def fallbacks(
    candidate: StageDeployment, chunk: int, vary_checkpointing: bool = True
) -> Iterator[StageDeployment]:
    """The candidate, then itself with ever more means against memory running out, fastest first:
    logits in chunks of so many positions (0: they would not help), activation checkpointing,
    optimizer offload.

    Smaller microbatches come before all of them (`smaller_microbatches`).
    """
    yield candidate
    if chunk:
        candidate = candidate._replace(logits_chunk_tokens=chunk)
        yield candidate
    if vary_checkpointing and not candidate.activation_checkpointing:
        candidate = candidate._replace(activation_checkpointing=True)
        yield candidate
    if candidate.stage == "update":
        yield candidate._replace(offload_optimizer=True)


_GB = 2**30


def _shape(
    kind: str, sizes: tuple[int, int, int, int, int, int], positions: int, tied: bool = False
) -> ModelShape:
    hidden, layers, heads, key_value_heads, feed_forward, vocabulary = sizes
    return ModelShape(
        model_type=kind,
        hidden_size=hidden,
        layers=layers,
        attention_heads=heads,
        key_value_heads=key_value_heads,
        intermediate_size=feed_forward,
        vocabulary=vocabulary,
        max_positions=positions,
        tied_embeddings=tied,
    )


MODELS: dict[str, ModelShape] = {
    "qwen2.5-7b": _shape("qwen2", (3584, 28, 28, 4, 18944, 152064), 131072),
    "qwen2.5-72b": _shape("qwen2", (8192, 80, 64, 8, 29568, 152064), 131072),
    "llama-3.1-8b": _shape("llama", (4096, 32, 32, 8, 14336, 128256), 131072),
    "llama-3.1-70b": _shape("llama", (8192, 80, 64, 8, 28672, 128256), 131072),
    "smollm2-135m": _shape("llama", (576, 30, 9, 3, 1536, 49152), 8192, tied=True),
}
"""From the models' published config.json; the position range is that of the base models."""

DEVICES: dict[str, DeviceFigures] = {
    "h100-80gb": DeviceFigures(
        name="H100-80GB",
        memory_bytes=80 * _GB,
        flops=989.4e12,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        host_bandwidth=64e9,
        source="NVIDIA H100 Tensor Core GPU data sheet, SXM5: 1,979 TFLOPS bf16 with sparsity, so "
        "989.4 dense; HBM3 3.35 TB/s; NVLink 900 GB/s and PCIe Gen5 128 GB/s, both ways together",
    ),
    "h200": DeviceFigures(
        name="H200",
        memory_bytes=141 * _GB,
        flops=989.4e12,
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
        host_bandwidth=64e9,
        source="NVIDIA H200 Tensor Core GPU data sheet, SXM: 1,979 TFLOPS bf16 with sparsity; "
        "HBM3e 141 GB, 4.8 TB/s; NVLink 900 GB/s, PCIe Gen5 128 GB/s, both ways together",
    ),
    "a100-80gb": DeviceFigures(
        name="A100-80GB",
        memory_bytes=80 * _GB,
        flops=312e12,
        memory_bandwidth=2.039e12,
        link_bandwidth=300e9,
        host_bandwidth=32e9,
        source="NVIDIA A100 Tensor Core GPU data sheet, SXM 80 GB: 312 TFLOPS bf16; HBM2e "
        "2,039 GB/s; NVLink 600 GB/s and PCIe Gen4 64 GB/s, both ways together",
    ),
}
"""A sheet's GB of HBM are taken as GiB: the stacks have binary sizes."""


def device_of(hardware: Hardware) -> DeviceFigures:
    """The figures of the hardware's devices; for a CPU, of one core with its share of the memory.

    A GPU that the catalogue does not have counts as an H100 with the memory it really has.
    """
    if not hardware.gpus:
        return cpu.figures(hardware)
    name = hardware.gpu_name.lower()
    known = next((DEVICES[key] for key in DEVICES if key.split("-")[0] in name), None)
    figures = known or DEVICES["h100-80gb"].model_copy(
        update={"name": hardware.gpu_name or "GPU", "source": "unknown GPU: taken as an H100"}
    )
    memory = hardware.gpu_memory_bytes or figures.memory_bytes
    return figures.model_copy(update={"memory_bytes": memory})


def memory_model(shape: ModelShape, hardware: Hardware) -> MemoryModel:
    """The memory formulas for this hardware."""
    model = MemoryModel if hardware.gpus else cpu.CpuMemoryModel
    return model(shape, device_of(hardware), hardware)


def cluster(device: str, hosts: int, gpus_per_host: int, network_gbit: float = 200.0) -> Hardware:
    """Hardware of equal hosts. device: a key of `DEVICES`. network_gbit: a host's links, one way.

    Raises `KeyError` for an unknown device.
    """
    figures = DEVICES[device]
    return Hardware(
        cpu_cores=96,
        memory_bytes=2048 * _GB,
        gpus=hosts * gpus_per_host,
        gpu_memory_bytes=figures.memory_bytes,
        gpu_name=figures.name,
        hosts=hosts,
        network_bandwidth=network_gbit * 1e9 / 8,
    )
