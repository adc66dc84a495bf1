"""Well-known model shapes, and devices with the figures of their data sheets."""

from __future__ import annotations

from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.selector.model import cpu
from earl_core.selector.model.memory_model import MemoryModel

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
