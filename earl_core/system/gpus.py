"""The NVIDIA driver's answers about this machine's GPUs; without torch.

Every driver brings a library that answers, NVML, and the package `nvidia-ml-py` (module `pynvml`)
binds it. A machine without a driver has no GPU; a driver that is there and does not answer is an
error, because workers would compute on GPUs that nobody planned for. The meanings of answers are
taken from NVIDIA's "NVML API Reference" and "Multi-Instance GPU User Guide", and from the section
on environment variables in the "CUDA C++ Programming Guide".
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.system.errors import ConfigError

DEVICE_FILES = Path("/dev")

_OR_NONE = "or export CUDA_VISIBLE_DEVICES= to work on the CPU alone"


class Gpu(NamedTuple):
    """One GPU, or one MIG instance of it.

    memory_bytes: 0 where the driver does not say, as on chips that share the host's memory.
    pcie_bandwidth: bytes/s to the host, one way, of the slot; 0 where the driver does not say, or
    where another link (NVLink-C2C) leads there. cores: those next to it; none where unknown.
    capability: of computing, such as 8.6; 0 where the driver does not say.
    """

    uuid: str
    name: str
    memory_bytes: int
    pcie_bandwidth: float = 0.0
    cores: frozenset[int] = frozenset()
    capability: float = 0.0


class Links(NamedTuple):
    """The links by which the GPUs of a process reach each other.

    nvlink_gpus: GPUs of each group of neighbours, by their numbers, that NVLink joins all with all;
    1: none are joined. nvlink_bandwidth: bytes/s of one GPU into its group, one way; 0 where the
    driver does not say. pcie_peers: true when all others are reached over PCIe without a copy in
    the host's memory.
    """

    nvlink_gpus: int = 1
    nvlink_bandwidth: float = 0.0
    pcie_peers: bool = True


class DriverVersion(NamedTuple):
    """version: such as 580.65.06. cuda: the newest CUDA that it knows, 13000 for 13.0."""

    version: str
    cuda: int


class GpuLoad(NamedTuple):
    """number: the driver's. load in percent, memory in bytes, power in watts; None: not told."""

    number: int
    load: float | None
    memory: float | None
    power: float | None


def visible_gpus() -> tuple[list[Gpu], Links]:
    """The GPUs that CUDA shows to this process, in its order, and what joins them. Raises
    `ConfigError` where there are GPUs and they cannot be told."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip() in ("", "-1"):
        return [], Links(0)
    with _driver() as nvml:
        if nvml is None:
            return [], Links(0)
        handles = _visible(nvml, chosen)
        return [_gpu(nvml, handle) for handle in handles], _links(nvml, handles)


def driver_version() -> DriverVersion | None:
    """The driver's; None on a machine without GPUs. Raises `ConfigError` as `visible_gpus`."""
    with _driver() as nvml:
        if nvml is None:
            return None
        return DriverVersion(
            nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
        )


def gpu_loads() -> list[GpuLoad]:
    """Measure the load of all GPUs of this machine. Raises `ConfigError` as `visible_gpus`."""
    with _driver() as nvml:
        handles = [] if nvml is None else _handles(nvml)
        return [_load(nvml, index, handle) for index, handle in enumerate(handles)]


@contextmanager
def _driver() -> Iterator[Any]:
    """`pynvml` with an open library; None where this process has no GPU.

    Without the library, or with one whose driver is not loaded, there is no GPU unless the machine
    has a device file: then a container or an installation is incomplete.
    """
    nvml = _opened()
    if nvml is None:
        yield None
        return
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise _unanswered(error) from error
    finally:
        nvml.nvmlShutdown()


def _opened() -> Any:
    files = sorted(str(path) for path in DEVICE_FILES.glob("nvidia[0-9]*"))
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        if not files:
            return None
        raise ConfigError(
            f"this machine has NVIDIA GPUs ({files[0]}), but no package that asks their driver",
            remedy=f"pip install nvidia-ml-py, {_OR_NONE}",
        ) from error
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as error:
        if not files:
            return None
        raise ConfigError(
            f"{files[0]} is there, but the driver's library is not to be used: {error}",
            remedy="in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install "
            f"the driver again, {_OR_NONE}",
        ) from error
    except nvml.NVMLError as error:
        raise _unanswered(error) from error
    return nvml


def _unanswered(error: Exception) -> ConfigError:
    return ConfigError(
        f"the driver of the NVIDIA GPUs does not answer: {error}",
        remedy="mend what nvidia-smi reports (after an update of the driver, restart the machine), "
        + _OR_NONE,
    )


def _told(nvml: Any, ask: Callable[..., Any], *given: Any, otherwise: Any = None) -> Any:
    """An answer; `otherwise` where this GPU or this driver does not know the question."""
    try:
        return ask(*given)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_InvalidArgument,
        nvml.NVMLError_NotFound,
    ):
        return otherwise


def _handles(nvml: Any) -> list[Any]:
    """List the GPUs that this process may use: NVML counts the others too, CUDA does not."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError_NoPermission):
            found.append(nvml.nvmlDeviceGetHandleByIndex(index))
    return found


def _visible(nvml: Any, chosen: str | None) -> list[Any]:
    """Handles of what CUDA_VISIBLE_DEVICES names: the first entry that names none ends the list.
    CUDA shows a process one MIG instance, of a whole GPU in that mode the first."""
    handles = _handles(nvml)
    entries = [str(n) for n in range(len(handles))] if chosen is None else chosen.split(",")
    entries = [entry.strip() for entry in entries]
    if any(entry.isdigit() for entry in entries):
        _check_order({nvml.nvmlDeviceGetName(handle) for handle in handles})
    seen: list[Any] = []
    for entry in entries:
        if entry.isdigit():
            named = handles[int(entry) : int(entry) + 1]
        else:
            named = [each for each in handles if _is_named(nvml, each, entry)]
            named += [i for each in handles for i in _mig(nvml, each) if _is_named(nvml, i, entry)]
        if len(named) != 1:
            break
        seen += [_usable(nvml, handle) for handle in named]
    parts = [nvml.nvmlDeviceGetUUID(each) for each in seen if _is_mig(nvml, each)]
    if parts and len(seen) > 1:
        raise ConfigError(
            "CUDA_VISIBLE_DEVICES shows several GPUs of which some are MIG instances "
            f"({', '.join(parts)}); CUDA gives a process one, and NCCL joins none",
            remedy="name one of them: CUDA_VISIBLE_DEVICES=MIG-...",
        )
    return seen


def _check_order(names: set[str]) -> None:
    if len(names) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ConfigError(
            f"this machine's GPUs differ ({', '.join(sorted(names))}): CUDA numbers them by their "
            "speed, the driver by their slots",
            remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID, and name the GPUs to use by "
            "CUDA_VISIBLE_DEVICES",
        )


def _is_named(nvml: Any, handle: Any, entry: str) -> bool:
    """Tell whether the entry names the GPU, by the beginning of its UUID."""
    return bool(entry) and nvml.nvmlDeviceGetUUID(handle).startswith(entry)


def _is_mig(nvml: Any, handle: Any) -> bool:
    return bool(_told(nvml, nvml.nvmlDeviceIsMigDeviceHandle, handle, otherwise=False))


def _mig(nvml: Any, handle: Any) -> list[Any]:
    """The MIG instances of a GPU; none where it is not in that mode."""
    mode = _told(nvml, nvml.nvmlDeviceGetMigMode, handle, otherwise=[0, 0])
    if mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return []
    most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    found = [
        _told(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        for index in range(most)
    ]
    instances = [each for each in found if each is not None]
    if not instances:
        raise ConfigError(
            f"{nvml.nvmlDeviceGetName(handle)} is in MIG mode and has no instance",
            remedy="make one (nvidia-smi mig -cgi), or end that mode (nvidia-smi -mig 0)",
        )
    return instances


def _usable(nvml: Any, handle: Any) -> Any:
    return next(iter(_mig(nvml, handle)), handle)


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        nvml.nvmlDeviceGetUUID(handle),
        nvml.nvmlDeviceGetName(handle),
        0 if memory is None else int(memory.total),
        _pcie_bandwidth(nvml, handle),
        _cores(nvml, handle),
        _capability(nvml, handle),
    )


def _capability(nvml: Any, handle: Any) -> float:
    ask = getattr(nvml, "nvmlDeviceGetCudaComputeCapability", None)  # older bindings have it not
    major, minor = (0, 0) if ask is None else _told(nvml, ask, handle, otherwise=(0, 0))
    return float(major + minor / 10)


def _pcie_bandwidth(nvml: Any, handle: Any) -> float:
    """A lane of the third generation carries 1 GB/s one way, and twice as much of each next, as
    data sheets count."""
    c2c = _told(nvml, nvml.nvmlDeviceGetC2cModeInfoV, handle)
    generation = _told(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle, otherwise=0)
    lanes = _told(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle, otherwise=0)
    if (c2c is not None and c2c.isC2cEnabled) or not generation or not lanes:
        return 0.0
    return float(2.0 ** (generation - 3) * lanes * 1e9)


def _cores(nvml: Any, handle: Any) -> frozenset[int]:
    words = -(-(os.cpu_count() or 1) // 64)
    masks = _told(nvml, nvml.nvmlDeviceGetCpuAffinity, handle, words, otherwise=())
    return frozenset(
        64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1
    )


def _links(nvml: Any, handles: Sequence[Any]) -> Links:
    if len(handles) < 2:
        return Links(len(handles))

    def joined(kind: int, pair: tuple[Any, Any]) -> bool:
        return bool(_told(nvml, nvml.nvmlDeviceGetP2PStatus, *pair, kind) == 0)

    count = len(handles)
    by_nvlink = {
        (one, other)
        for one, other in combinations(range(count), 2)
        if joined(nvml.NVML_P2P_CAPS_INDEX_NVLINK, (handles[one], handles[other]))
    }

    def whole(size: int) -> bool:
        groups = [range(first, first + size) for first in range(0, count, size)]
        return all(pair in by_nvlink for group in groups for pair in combinations(group, 2))

    size = next(n for n in range(count, 0, -1) if count % n == 0 and whole(n))
    bandwidth = min(_nvlink_bandwidth(nvml, each, handles) for each in handles) if size > 1 else 0.0
    # Of the constants for reading and for writing, pynvml's first is no number.
    peers = all(joined(nvml.NVML_P2P_CAPS_INDEX_WRITE, pair) for pair in combinations(handles, 2))
    return Links(size, bandwidth, peers)


def _nvlink_bandwidth(nvml: Any, handle: Any, handles: Sequence[Any]) -> float:
    """bytes/s one way over the active links that lead to a switch or to one of these GPUs."""
    others = {nvml.nvmlDeviceGetPciInfo(each).busId for each in handles}
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _told(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link, otherwise=0):
            continue
        kind = _told(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        remote = _told(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        active += switch or (remote is not None and remote.busId in others)
    field = nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    (speed,) = _told(nvml, nvml.nvmlDeviceGetFieldValues, handle, [field], otherwise=[None])
    if speed is None or speed.nvmlReturn != 0:
        return 0.0
    return float(active * speed.value.uiVal * 1e6)


def _load(nvml: Any, index: int, handle: Any) -> GpuLoad:
    load = _told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    power = _told(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return GpuLoad(
        index,
        None if load is None else float(load.gpu),
        None if memory is None else float(memory.used),
        None if power is None else power / 1000,
    )
