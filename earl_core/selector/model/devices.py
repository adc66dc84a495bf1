"""Devices with the figures of their data sheets, and those of the hardware there is.

A GPU counts as one of the catalogue when its driver's name is that of the catalogue, letter for
letter: cards of one family differ up to three times (an H100 PCIe has 76 % of the arithmetic and
60 % of the bandwidth of an SXM5). Any other is measured, never taken for a relative.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from earl_core.deployment.shapes import DeviceFigures, Hardware
from earl_core.selector.model import cpu
from earl_core.system.errors import ConfigError

_GB = 2**30

_LAYER_SECONDS = 11 * 3.4e-6
"""Least seconds of a pass through one decoder layer: 11 kernels (two norms, four products, rotary
embedding, write of keys and values, attention, activation, product of the gate) of which each takes
3.4 us in a CUDA graph, however small: "Getting Started with CUDA Graphs", NVIDIA Technical Blog,
2019, on a V100. Newer GPUs were not measured."""

_ALL, _NONE, _PAIRS = 0, 1, 2
"""GPUs that NVLink joins (`DeviceFigures.nvlink_gpus`): those of one board; no others, also where a
bridge is sold apart, which counts where the driver reports it; those of one bridge."""


def _sheet(
    name: str,
    memory_gb: int,
    tflops: float,
    memory_gbs: float,
    nvlink_gbs: float,
    pcie_gbs: float,
    source: str,
    nvlink_gpus: int,
    c2c_gbs: float = 0.0,
) -> DeviceFigures:
    """Rates in dense bf16 TFLOPS and GB/s, of links one way; a sheet's GB of memory are taken as
    GiB, because the stacks have binary sizes. nvlink_gbs: 0: there is none. c2c_gbs: of the link to
    the host's memory where that is not PCIe."""
    return DeviceFigures(
        name=name,
        memory_bytes=memory_gb * _GB,
        flops=tflops * 1e12,
        memory_bandwidth=memory_gbs * 1e9,
        link_bandwidth=(nvlink_gbs or pcie_gbs) * 1e9,
        host_bandwidth=(c2c_gbs or pcie_gbs) * 1e9,
        peer_bandwidth=pcie_gbs * 1e9,
        layer_seconds=_LAYER_SECONDS,
        source=source,
        nvlink_gpus=nvlink_gpus,
    )


DEVICES: dict[str, DeviceFigures] = {
    "a100-40gb": _sheet(
        "A100-40GB", 40, 312, 1555, 300, 32,
        "NVIDIA A100 Tensor Core GPU data sheet, SXM 40 GB: 312 TFLOPS bf16; HBM2 1,555 GB/s; "
        "NVLink 600 GB/s and PCIe Gen4 64 GB/s, both ways together",
        _ALL,
    ),
    "a100-80gb": _sheet(
        "A100-80GB", 80, 312, 2039, 300, 32,
        "NVIDIA A100 Tensor Core GPU data sheet, SXM 80 GB: 312 TFLOPS bf16; HBM2e 2,039 GB/s; "
        "NVLink 600 GB/s and PCIe Gen4 64 GB/s, both ways together",
        _ALL,
    ),
    "a100-pcie-40gb": _sheet(
        "A100-PCIe-40GB", 40, 312, 1555, 300, 32,
        "NVIDIA A100 40GB PCIe product brief PB-10137-001: HBM2 1,555 GB/s; data sheet: 312 TFLOPS "
        "bf16; NVLink bridge for two GPUs 600 GB/s and PCIe Gen4 64 GB/s, both ways together",
        _NONE,
    ),
    "a100-pcie-80gb": _sheet(
        "A100-PCIe-80GB", 80, 312, 1935, 300, 32,
        "NVIDIA A100 Tensor Core GPU data sheet, PCIe 80 GB: 312 TFLOPS bf16; HBM2e 1,935 GB/s; "
        "NVLink bridge for two GPUs 600 GB/s and PCIe Gen4 64 GB/s, both ways together",
        _NONE,
    ),
    "h100-80gb": _sheet(
        "H100-80GB", 80, 989.4, 3350, 450, 64,
        "NVIDIA H100 Tensor Core GPU data sheet, SXM5: 1,979 TFLOPS bf16 with sparsity, so 989.4 "
        "dense; HBM3 3.35 TB/s; NVLink 900 GB/s and PCIe Gen5 128 GB/s, both ways together",
        _ALL,
    ),
    "h100-pcie-80gb": _sheet(
        "H100-PCIe-80GB", 80, 756.5, 2000, 300, 64,
        "NVIDIA H100 Tensor Core GPU data sheet of 2022, PCIe: 1,513 TFLOPS bf16 with sparsity, so "
        "756.5 dense; HBM2e 2 TB/s; NVLink bridge for two GPUs 600 GB/s and PCIe Gen5 128 GB/s, "
        "both ways together",
        _NONE,
    ),
    "h100-nvl-94gb": _sheet(
        "H100-NVL-94GB", 94, 835.5, 3900, 300, 64,
        "NVIDIA H100 Tensor Core GPU data sheet, NVL: 1,671 TFLOPS bf16 with sparsity, so 835.5 "
        "dense; HBM3 94 GB, 3.9 TB/s; NVLink bridge for two GPUs 600 GB/s and PCIe Gen5 128 GB/s, "
        "both ways together",
        _PAIRS,
    ),
    "h200": _sheet(
        "H200", 141, 989.4, 4800, 450, 64,
        "NVIDIA H200 Tensor Core GPU data sheet, SXM: 1,979 TFLOPS bf16 with sparsity; HBM3e "
        "141 GB, 4.8 TB/s; NVLink 900 GB/s, PCIe Gen5 128 GB/s, both ways together",
        _ALL,
    ),
    "h200-nvl": _sheet(
        "H200-NVL", 141, 835.5, 4800, 450, 64,
        "NVIDIA H200 Tensor Core GPU data sheet, NVL: 1,671 TFLOPS bf16 with sparsity, so 835.5 "
        "dense; HBM3e 141 GB, 4.8 TB/s; NVLink bridge for two or four GPUs 900 GB/s and PCIe Gen5 "
        "128 GB/s, both ways together",
        _PAIRS,
    ),
    "h20": _sheet(
        "H20", 96, 148, 4000, 450, 64,
        "NVIDIA publishes no data sheet of the H20; as its partners quote one: 148 TFLOPS bf16, "
        "dense; HBM3 96 GB, 4.0 TB/s; NVLink 900 GB/s, PCIe Gen5 128 GB/s, both ways together",
        _ALL,
    ),
    "gh200-96gb": _sheet(
        "GH200-96GB", 96, 989.4, 4000, 450, 64,
        "NVIDIA GH200 Grace Hopper Superchip data sheet: 1,979 TFLOPS bf16 with sparsity; HBM3 "
        "96 GB, 4 TB/s; NVLink-C2C to the host's memory 900 GB/s, NVLink 900 GB/s, PCIe Gen5 "
        "128 GB/s, both ways together",
        _ALL,
        c2c_gbs=450,
    ),
    "gh200-144gb": _sheet(
        "GH200-144GB", 144, 989.4, 4900, 450, 64,
        "NVIDIA GH200 Grace Hopper Superchip data sheet: 1,979 TFLOPS bf16 with sparsity; HBM3e "
        "144 GB, 4.9 TB/s; NVLink-C2C to the host's memory 900 GB/s, NVLink 900 GB/s, PCIe Gen5 "
        "128 GB/s, both ways together",
        _ALL,
        c2c_gbs=450,
    ),
    "b200": _sheet(
        "B200", 180, 2250, 8000, 900, 64,
        "NVIDIA DGX B200 and HGX B200 data sheets, an eighth of the system: 36 PFLOPS bf16 with "
        "sparsity, so 2.25 dense; HBM3e 1,440 GB, 64 TB/s; NVLink 14.4 TB/s, PCIe Gen5 128 GB/s, "
        "both ways together",
        _ALL,
    ),
    "l40s": _sheet(
        "L40S", 48, 362.05, 864, 0, 32,
        "NVIDIA L40S data sheet: 362.05 TFLOPS bf16, dense; GDDR6 48 GB, 864 GB/s; no NVLink, PCIe "
        "Gen4 64 GB/s, both ways together",
        _NONE,
    ),
    "l4": _sheet(
        "L4", 24, 121, 300, 0, 32,
        "NVIDIA L4 data sheet: 242 TFLOPS bf16 with sparsity, so 121 dense; GDDR6 24 GB, 300 GB/s; "
        "no NVLink, PCIe Gen4 64 GB/s, both ways together",
        _NONE,
    ),
    "rtx-4090": _sheet(
        "RTX 4090", 24, 165.2, 1008, 0, 32,
        "NVIDIA Ada GPU architecture white paper, RTX 4090: 165.2 TFLOPS bf16, dense; GDDR6X "
        "24 GB, 1,008 GB/s; no NVLink, PCIe Gen4 64 GB/s, both ways together",
        _NONE,
    ),
}  # fmt: skip

_OF_DRIVERS = {
    "a100-sxm4-40gb": "a100-40gb",
    "a100-sxm4-80gb": "a100-80gb",
    "a100-pcie-40gb": "a100-pcie-40gb",
    "a100 80gb pcie": "a100-pcie-80gb",
    "h100 80gb hbm3": "h100-80gb",
    "h100 pcie": "h100-pcie-80gb",
    "h100 nvl": "h100-nvl-94gb",
    "h200": "h200",
    "h200 nvl": "h200-nvl",
    "h20": "h20",
    "gh200 480gb": "gh200-96gb",
    "gh200 144g hbm3e": "gh200-144gb",
    "b200": "b200",
    "l40s": "l40s",
    "l4": "l4",
    "geforce rtx 4090": "rtx-4090",
}
"""Keys of `DEVICES` by drivers' names after `NVIDIA`. The 480 GB of a GH200 are its host's."""

_MIG = re.compile(r"(.+) mig (?:\d+c\.)?(\d)g\.\d+gb.*")
_SIZE = re.compile(r"(\d+) ?gb\b")
_SLICES = 7
"""Parts that a GPU's arithmetic has under MIG; memory and its bandwidth have the part of the size.
"NVIDIA Multi-Instance GPU User Guide", profiles of A100, H100 and H200."""


def find_devices(name: str) -> list[str]:
    """Keys of `DEVICES` that a name means, as people or drivers write it: `h100`, `rtx4090`,
    `NVIDIA A100-SXM4-40GB`; without a size all that there are, largest first."""
    text = name.lower()
    if (key := _of_driver(text)) is not None:
        return [key]
    kinds = {key: kind[0] for key in DEVICES if (kind := re.search(_kind(key), text))}
    # A name with a suffix, such as h100-nvl, has that of its family in it.
    longest = max(map(len, kinds.values()), default=0)
    found = [key for key, kind in kinds.items() if len(kind) == longest]
    size = _SIZE.search(text)
    sized = [key for key in found if size and f"{size[1]}gb" in key]
    return sorted(sized or found, key=lambda key: -DEVICES[key].memory_bytes)


def _of_driver(name: str) -> str | None:
    return _OF_DRIVERS.get(name.lower().removeprefix("nvidia "))


def _kind(key: str) -> str:
    """A pattern of the key without its size."""
    return r"\b" + re.sub(r"-\d+gb$", "", key).replace("-", "[ -]?") + r"\b"


def is_known(hardware: Hardware) -> bool:
    """Tell whether a data sheet stands behind the GPUs of this name; true of a CPU."""
    return not hardware.gpus or next(_sheets(hardware.gpu_name), None) is not None


def _sheets(name: str) -> Iterator[DeviceFigures]:
    """Yield the figures of the device with that name, of a driver or of the catalogue; at most one.
    A MIG instance has its share of the arithmetic."""
    mig = _MIG.fullmatch(name.lower())
    whole = mig[1] if mig else name.lower()
    key = _of_driver(whole)
    for figures in DEVICES.values():
        if figures is DEVICES.get(key or "") or figures.name.lower() == whole:
            flops = figures.flops * (int(mig[2]) / _SLICES if mig else 1.0)
            yield figures.model_copy(update={"name": name if mig else figures.name, "flops": flops})
            return


def device_of(hardware: Hardware) -> DeviceFigures:
    """The figures of the hardware's devices, as the driver found them; for a CPU, of one core with
    its share of the memory.

    Raises `ConfigError` for a GPU that the catalogue does not have and nobody measured.
    """
    if not hardware.gpus:
        return cpu.figures(hardware)
    figures = next(_sheets(hardware.gpu_name), hardware.figures)
    if figures is None:
        raise ConfigError(
            f"no figures are known of the GPU {hardware.gpu_name or 'without a name'}",
            remedy="on a machine that has it, `earl plan` and every run measure it once; ask for "
            f"another one there is a data sheet of: {', '.join(DEVICES)}",
        )
    return figures.model_copy(update=_found(figures, hardware))


def _found(figures: DeviceFigures, hardware: Hardware) -> dict[str, float]:
    """Return the figures that the driver said, in place of the sheet's."""
    memory = hardware.gpu_memory_bytes or figures.memory_bytes
    found: dict[str, float] = {"memory_bytes": memory}
    if " mig " in figures.name.lower():
        found["memory_bandwidth"] = figures.memory_bandwidth * min(
            1.0, _eighths(memory, figures.memory_bytes) / 8
        )
    pcie = hardware.pcie_bandwidth
    found["host_bandwidth"] = min(figures.host_bandwidth, pcie or figures.host_bandwidth)
    peer = min(figures.peer_bandwidth or figures.host_bandwidth, pcie or figures.host_bandwidth)
    # Through the host's memory each byte is written, then read: half, by that alone.
    found["peer_bandwidth"] = peer if hardware.pcie_peers else peer / 2
    found["nvlink_gpus"] = hardware.nvlink_gpus or figures.nvlink_gpus
    joined = hardware.nvlink_bandwidth or figures.link_bandwidth
    if figures is not hardware.figures:
        # The driver counts bits of which a part is framing.
        joined = min(joined, figures.link_bandwidth)
    found["link_bandwidth"] = found["peer_bandwidth"] if found["nvlink_gpus"] == 1 else joined
    return found


def _eighths(part: int, whole: int) -> int:
    """Count the eighths of the memory in a part; a driver keeps a little of each for itself."""
    return max(1, round(8 * part / whole))


def cluster(device: str, hosts: int, gpus_per_host: int, network_gbit: float = 200.0) -> Hardware:
    """Hardware of equal hosts. device: a key of `DEVICES`. network_gbit: a host's links, one way.
    Raises `KeyError` for an unknown device."""
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
