"""Well-known model shapes, and devices with the figures of their data sheets."""

from __future__ import annotations

import re

from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.selector.model import cpu

_GB = 2**30


def _family(
    kind: str, vocabulary: int, positions: int, *, tied: bool = False, head_dim: int = 0
) -> ModelShape:
    """What the models of a family share; the sizes are those of none."""
    return ModelShape(
        model_type=kind,
        hidden_size=1,
        layers=1,
        attention_heads=1,
        key_value_heads=1,
        head_dim=head_dim,
        vocabulary=vocabulary,
        max_positions=positions,
        tied_embeddings=tied,
    )


def _sized(
    family: ModelShape, hidden: int, layers: int, heads: int, key_value: int, feed_forward: int
) -> ModelShape:
    sizes = {
        "hidden_size": hidden,
        "layers": layers,
        "attention_heads": heads,
        "key_value_heads": key_value,
        "intermediate_size": feed_forward,
    }
    return ModelShape(**family.model_dump() | sizes)


_QWEN3 = _family("qwen3", 151936, 40960, head_dim=128)
_QWEN3_TIED = _family("qwen3", 151936, 40960, head_dim=128, tied=True)
_QWEN2 = _family("qwen2", 152064, 131072)
_LLAMA = _family("llama", 128256, 131072)
_LLAMA_TIED = _family("llama", 128256, 131072, tied=True)
_SMOLLM2 = _family("llama", 49152, 8192, tied=True)
_MISTRAL = _family("mistral", 131072, 131072, head_dim=128)

MODELS: dict[str, ModelShape] = {
    "qwen3-0.6b": _sized(_QWEN3_TIED, 1024, 28, 16, 8, 3072),
    "qwen3-1.7b": _sized(_QWEN3_TIED, 2048, 28, 16, 8, 6144),
    "qwen3-4b": _sized(_QWEN3_TIED, 2560, 36, 32, 8, 9728),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 8, 12288),
    "qwen3-14b": _sized(_QWEN3, 5120, 40, 40, 8, 17408),
    "qwen3-32b": _sized(_QWEN3, 5120, 64, 64, 8, 25600),
    "qwen2.5-0.5b": _sized(_family("qwen2", 151936, 32768, tied=True), 896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": _sized(_family("qwen2", 151936, 131072, tied=True), 1536, 28, 12, 2, 8960),
    "qwen2.5-3b": _sized(_family("qwen2", 151936, 32768, tied=True), 2048, 36, 16, 2, 11008),
    "qwen2.5-7b": _sized(_QWEN2, 3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _sized(_QWEN2, 5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _sized(_QWEN2, 5120, 64, 40, 8, 27648),
    "qwen2.5-72b": _sized(_QWEN2, 8192, 80, 64, 8, 29568),
    "llama-3.2-1b": _sized(_LLAMA_TIED, 2048, 16, 32, 8, 8192),
    "llama-3.2-3b": _sized(_LLAMA_TIED, 3072, 28, 24, 8, 8192),
    "llama-3.1-8b": _sized(_LLAMA, 4096, 32, 32, 8, 14336),
    "llama-3.1-70b": _sized(_LLAMA, 8192, 80, 64, 8, 28672),
    "llama-3.3-70b": _sized(_LLAMA, 8192, 80, 64, 8, 28672),
    "smollm2-135m": _sized(_SMOLLM2, 576, 30, 9, 3, 1536),
    "smollm2-360m": _sized(_SMOLLM2, 960, 32, 15, 5, 2560),
    "smollm2-1.7b": _sized(_SMOLLM2, 2048, 24, 32, 32, 8192),
    "smollm3-3b": _sized(_family("smollm3", 128256, 65536, tied=True), 2048, 36, 16, 4, 11008),
    "mistral-7b-v0.3": _sized(_family("mistral", 32768, 32768), 4096, 32, 32, 8, 14336),
    "mistral-nemo-12b": _sized(_MISTRAL, 5120, 40, 32, 8, 14336),
    "mistral-small-24b": _sized(
        _family("mistral", 131072, 32768, head_dim=128), 5120, 40, 32, 8, 32768
    ),
}
"""From the models' published config.json; the position range is that of the base models, without
scaling that has to be switched on. Mixtures of experts are left out, as are models whose layers
attend to a window only (Gemma): no formula knows them."""


def known_model(name: str) -> ModelShape | None:
    """The shape of a well-known model, such as `qwen3-8b` or `Qwen/Qwen3-8B`; None for others."""
    return MODELS.get(re.sub(r"-(instruct|base)$", "", name.lower().rpartition("/")[2]))


DEVICES: dict[str, DeviceFigures] = {
    "a100-40gb": DeviceFigures(
        name="A100-40GB",
        memory_bytes=40 * _GB,
        flops=312e12,
        memory_bandwidth=1.555e12,
        link_bandwidth=300e9,
        host_bandwidth=32e9,
        source="NVIDIA A100 Tensor Core GPU data sheet, SXM 40 GB: 312 TFLOPS bf16; HBM2 "
        "1,555 GB/s; NVLink 600 GB/s and PCIe Gen4 64 GB/s, both ways together",
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
    "b200": DeviceFigures(
        name="B200",
        memory_bytes=180 * _GB,
        flops=2.25e15,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        host_bandwidth=64e9,
        source="NVIDIA DGX B200 and HGX B200 data sheets, an eighth of the system: 36 PFLOPS bf16 "
        "with sparsity, so 2.25 dense; HBM3e 1,440 GB, 64 TB/s; NVLink 14.4 TB/s, PCIe Gen5 "
        "128 GB/s, both ways together",
    ),
    "l40s": DeviceFigures(
        name="L40S",
        memory_bytes=48 * _GB,
        flops=362.05e12,
        memory_bandwidth=864e9,
        link_bandwidth=32e9,
        host_bandwidth=32e9,
        source="NVIDIA L40S data sheet: 362.05 TFLOPS bf16, dense; GDDR6 48 GB, 864 GB/s; no "
        "NVLink, PCIe Gen4 64 GB/s, both ways together",
    ),
    "l4": DeviceFigures(
        name="L4",
        memory_bytes=24 * _GB,
        flops=121e12,
        memory_bandwidth=300e9,
        link_bandwidth=32e9,
        host_bandwidth=32e9,
        source="NVIDIA L4 data sheet: 242 TFLOPS bf16 with sparsity, so 121 dense; GDDR6 24 GB, "
        "300 GB/s; no NVLink, PCIe Gen4 64 GB/s, both ways together",
    ),
    "rtx-4090": DeviceFigures(
        name="RTX 4090",
        memory_bytes=24 * _GB,
        flops=165.2e12,
        memory_bandwidth=1.008e12,
        link_bandwidth=32e9,
        host_bandwidth=32e9,
        source="NVIDIA Ada GPU architecture white paper, RTX 4090: 165.2 TFLOPS bf16, dense; "
        "GDDR6X 24 GB, 1,008 GB/s; no NVLink, PCIe Gen4 64 GB/s, both ways together",
    ),
}
"""A sheet's GB of memory are taken as GiB: the stacks have binary sizes."""

_SIZE = re.compile(r"(\d+) ?gb\b")


def find_devices(name: str) -> list[str]:
    """Keys of `DEVICES` that a device's name means, as people or drivers write it: `h100`,
    `rtx4090`, `NVIDIA A100-SXM4-40GB`; without a size all that there are, largest first."""
    text = name.lower()
    found = [key for key in DEVICES if re.search(rf"\b{_kind(key)}\b", text)]
    size = _SIZE.search(text)
    sized = [key for key in found if size and f"{size[1]}gb" in key]
    return sorted(sized or found, key=lambda key: -DEVICES[key].memory_bytes)


def _kind(key: str) -> str:
    """A pattern of the key without its size."""
    return re.sub(r"-\d+gb$", "", key).replace("-", "[ -]?")


def device_of(hardware: Hardware) -> DeviceFigures:
    """The figures of the hardware's devices; for a CPU, of one core with its share of the memory.

    A GPU that the catalogue does not have counts as an H100 with the memory it really has.
    """
    if not hardware.gpus:
        return cpu.figures(hardware)
    memory = hardware.gpu_memory_bytes
    known = [DEVICES[key] for key in find_devices(hardware.gpu_name)]
    # A name without a size, such as an instance's, leaves it to the memory that was read.
    figures = min(known, key=lambda each: abs(each.memory_bytes - memory), default=None)
    if figures is None:
        figures = DEVICES["h100-80gb"].model_copy(
            update={"name": hardware.gpu_name or "GPU", "source": "unknown GPU: taken as an H100"}
        )
    return figures.model_copy(update={"memory_bytes": memory or figures.memory_bytes})


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
