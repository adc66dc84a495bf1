"""Stands in for `pynvml` where there is no driver: answers of machines, written by hand.

NO ANSWER HERE WAS RECORDED ON A MACHINE. They are written from NVIDIA's "NVML API Reference" (which
questions a GPU answers, and with what), data sheets and product briefs (memory, slots, links), the
"Multi-Instance GPU User Guide" (profiles and their names) and the names that drivers report, as
lists of devices on the web have them. Names, constants and errors are those of `nvidia-ml-py` 13:
where that is installed, a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

GIB = 2**30
MIB = 2**20


class NVMLError(Exception):
    pass


def _error(name: str, text: str) -> type[NVMLError]:
    return type(name, (NVMLError,), {"__str__": lambda self: text})


ERRORS = {
    "NVMLError": NVMLError,
    "NVMLError_NotSupported": _error("NVMLError_NotSupported", "Not Supported"),
    "NVMLError_FunctionNotFound": _error("NVMLError_FunctionNotFound", "Function Not Found"),
    "NVMLError_InvalidArgument": _error("NVMLError_InvalidArgument", "Invalid Argument"),
    "NVMLError_NotFound": _error("NVMLError_NotFound", "Not Found"),
    "NVMLError_NoPermission": _error("NVMLError_NoPermission", "Insufficient Permissions"),
    "NVMLError_LibraryNotFound": _error(
        "NVMLError_LibraryNotFound", "NVML Shared Library Not Found"
    ),
    "NVMLError_DriverNotLoaded": _error("NVMLError_DriverNotLoaded", "Driver Not Loaded"),
    "NVMLError_GpuIsLost": _error("NVMLError_GpuIsLost", "GPU is lost"),
    "NVMLError_LibRmVersionMismatch": _error(
        "NVMLError_LibRmVersionMismatch", "RM has detected an NVML/RM version mismatch."
    ),
}

CONSTANTS = {
    "NVML_DEVICE_MIG_ENABLE": 1,
    "NVML_NVLINK_MAX_LINKS": 36,
    "NVML_NVLINK_DEVICE_TYPE_GPU": 0,
    "NVML_NVLINK_DEVICE_TYPE_SWITCH": 2,
    "NVML_P2P_CAPS_INDEX_WRITE": 1,
    "NVML_P2P_CAPS_INDEX_NVLINK": 2,
    "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON": 90,
}

UNKNOWN = ERRORS["NVMLError_NotSupported"]


@dataclass(frozen=True)
class Board:
    """What the driver says of one GPU. memory: bytes, None for N/A. pcie: generation and lanes.
    links: where each active NVLink leads: a switch, or the GPU of that number. speed: MB/s of one.
    near: numbers of cores. ours: whether this process may use it. instances: MIG instances as
    (name, memory)."""

    name: str
    memory: int | None
    pcie: tuple[int, int] = (5, 16)
    links: tuple[str | int, ...] = ()
    speed: int = 0
    near: tuple[int, ...] = ()
    c2c: bool = False
    ours: bool = True
    load: int | None = 37
    power: int | None = 55_500
    capability: tuple[int, int] | None = (9, 0)
    instances: tuple[tuple[str, int], ...] | None = None
    uuid: str = ""
    number: int = 0
    parent: Board | None = None

    @property
    def bus(self) -> str:
        return f"00000000:{self.number + 1:02X}:00.0"


@dataclass
class Machine:
    """peers: whether GPUs reach each other over PCIe. broken: raised by every question."""

    boards: list[Board] = field(default_factory=list)
    peers: bool = True
    driver: str = "580.65.06"
    cuda: int = 13000
    broken: type[NVMLError] | None = None
    refused: type[NVMLError] | None = None

    def __post_init__(self) -> None:
        self.boards = [
            replace(board, number=n, uuid=board.uuid or f"GPU-{n:08x}-1111-2222-3333-444444444444")
            for n, board in enumerate(self.boards)
        ]

    def module(self) -> SimpleNamespace:
        """The stand-in; `open` counts initialisations that were not shut down."""
        found = SimpleNamespace(**ERRORS, **CONSTANTS, open=0)
        for name in dir(self):
            if name.startswith("nvml"):
                setattr(found, name, self._guarded(getattr(self, name)))
        found.nvmlInit, found.nvmlShutdown = self._init(found), self._shutdown(found)
        return found

    def _guarded(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*given: Any) -> Any:
            if self.broken is not None:
                raise self.broken
            return ask(*given)

        return answer

    def _init(self, module: SimpleNamespace) -> Callable[[], None]:
        def init() -> None:
            if self.refused is not None:
                raise self.refused
            module.open += 1

        return init

    def _shutdown(self, module: SimpleNamespace) -> Callable[[], None]:
        def shutdown() -> None:
            module.open -= 1

        return shutdown

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:  # noqa: N802
        if not self.boards[index].ours:
            raise ERRORS["NVMLError_NoPermission"]
        return self.boards[index]

    def nvmlDeviceGetName(self, board: Board) -> str:  # noqa: N802
        return board.name

    def nvmlDeviceGetUUID(self, board: Board) -> str:  # noqa: N802
        return board.uuid

    def nvmlDeviceGetMemoryInfo(self, board: Board) -> SimpleNamespace:  # noqa: N802
        if board.memory is None:
            raise UNKNOWN
        return SimpleNamespace(total=board.memory, used=GIB, free=board.memory - GIB)

    def nvmlDeviceIsMigDeviceHandle(self, board: Board) -> int:  # noqa: N802
        return int(board.parent is not None)

    def nvmlDeviceGetMigMode(self, board: Board) -> list[int]:  # noqa: N802
        if board.parent is not None or "RTX" in board.name or "L40S" in board.name:
            raise UNKNOWN
        return [int(board.instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, board: Board) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: Board, index: int) -> Board:  # noqa: N802
        instances = board.instances or ()
        # Their numbers have gaps.
        place, gap = divmod(index, 2)
        if gap or place >= len(instances):
            raise ERRORS["NVMLError_NotFound"]
        name, memory = instances[place]
        uuid = f"MIG-{place:08x}-aaaa-bbbb-cccc-{board.number:012x}"
        return replace(
            board, name=name, memory=memory, uuid=uuid, instances=None, parent=board, near=()
        )

    def nvmlDeviceGetC2cModeInfoV(self, board: Board) -> SimpleNamespace:  # noqa: N802
        if not board.c2c:
            raise UNKNOWN
        return SimpleNamespace(isC2cEnabled=1)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, board: Board) -> int:  # noqa: N802
        return board.pcie[0]

    def nvmlDeviceGetCudaComputeCapability(self, board: Board) -> tuple[int, int]:  # noqa: N802
        if board.parent is not None or board.capability is None:
            raise UNKNOWN
        return board.capability

    def nvmlDeviceGetMaxPcieLinkWidth(self, board: Board) -> int:  # noqa: N802
        return board.pcie[1]

    def nvmlDeviceGetCpuAffinity(self, board: Board, words: int) -> list[int]:  # noqa: N802
        if board.parent is not None:
            raise UNKNOWN
        masks = [sum(1 << core % 64 for core in board.near if core // 64 == n) for n in range(8)]
        return masks[:words]

    def nvmlDeviceGetP2PStatus(self, one: Board, other: Board, kind: Any) -> int:  # noqa: N802
        assert isinstance(kind, int), "ctypes would refuse it"
        switched = "switch" in one.links and "switch" in other.links
        if kind == CONSTANTS["NVML_P2P_CAPS_INDEX_NVLINK"]:
            return 0 if switched or other.number in one.links else 5
        return 0 if self.peers or switched or other.number in one.links else 1

    def nvmlDeviceGetNvLinkState(self, board: Board, link: int) -> int:  # noqa: N802
        if not board.links:
            raise UNKNOWN
        if link >= 18:
            raise ERRORS["NVMLError_InvalidArgument"]
        return int(link < len(board.links))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, board: Board, link: int) -> int:  # noqa: N802
        return 2 if board.links[link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, board: Board, link: int) -> Any:  # noqa: N802
        to = board.links[link]
        return SimpleNamespace(busId="00000000:C1:00.0" if to == "switch" else self.boards[to].bus)

    def nvmlDeviceGetPciInfo(self, board: Board) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=board.bus)

    def nvmlDeviceGetFieldValues(self, board: Board, fields: list[int]) -> list[Any]:  # noqa: N802
        assert fields == [CONSTANTS["NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON"]]
        value = SimpleNamespace(uiVal=board.speed)
        return [SimpleNamespace(nvmlReturn=0 if board.speed else 3, value=value)]

    def nvmlDeviceGetUtilizationRates(self, board: Board) -> SimpleNamespace:  # noqa: N802
        if board.load is None:
            raise UNKNOWN
        return SimpleNamespace(gpu=board.load, memory=0)

    def nvmlDeviceGetPowerUsage(self, board: Board) -> int:  # noqa: N802
        if board.power is None:
            raise UNKNOWN
        return board.power


SWITCHED = ("switch",) * 18
H100 = Board("NVIDIA H100 80GB HBM3", 81559 * MIB, links=SWITCHED, speed=26562)
PCIE_H100 = Board("NVIDIA H100 PCIe", 81559 * MIB)
A100 = Board("NVIDIA A100-PCIE-40GB", 40960 * MIB, pcie=(4, 16))
L40S = Board("NVIDIA L40S", 46068 * MIB, pcie=(4, 16))
RTX = Board("NVIDIA GeForce RTX 4090", 24564 * MIB, pcie=(4, 8))
MIG = replace(
    H100,
    links=(),
    instances=(
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40448 * MIB),
        ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", 20096 * MIB),
    ),
)


def _nvl(other: int) -> Board:
    return Board("NVIDIA H100 NVL", 95830 * MIB, links=(other,) * 12, speed=26562)


MACHINES: dict[str, Machine] = {
    "one H100 SXM": Machine([replace(H100, near=(0, 1))]),
    "8 x H100 SXM with NVSwitch": Machine([H100] * 8),
    "H100 PCIe": Machine([PCIE_H100]),
    "H100 NVL pair": Machine([_nvl(1), _nvl(0)]),
    "A100 PCIe 40 GB": Machine([A100]),
    "4 x L40S without peers": Machine([L40S] * 4, peers=False),
    "2 x RTX 4090": Machine([RTX] * 2, peers=False),
    "GH200 with N/A memory": Machine([Board("NVIDIA GH200 480GB", None, c2c=True)]),
    "MIG 3g.40gb on H100": Machine([MIG]),
    "8 x B200": Machine([Board("NVIDIA B200", 183359 * MIB, links=SWITCHED, speed=53125)] * 8),
}


def install(patch: pytest.MonkeyPatch, machine: Machine, visible: str | None = None) -> Any:
    """Have this process ask the machine; returns the stand-in. visible: CUDA_VISIBLE_DEVICES."""
    module = machine.module()
    patch.setitem(sys.modules, "pynvml", module)
    if visible is None:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return module
