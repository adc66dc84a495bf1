"""GPUs as their driver tells of them, down to the figures that the selector plans with."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from earl_core.cluster.host import local_hosts
from earl_core.control import device_figures
from earl_core.control.device_figures import with_figures
from earl_core.control.hardware import read_hardware
from earl_core.control.precision import decide
from earl_core.deployment.shapes import DeviceFigures, Hardware
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import DEVICES, cluster, device_of
from earl_core.selector.model.roofline import Roofline
from earl_core.system import gpus
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import read_resources
from flows.cli.app import app
from tests.nvml import CONSTANTS, ERRORS, H100, L40S, MACHINES, MIB, MIG, RTX, Machine, install

EXPECTED: dict[str, dict[str, Any]] = {
    # GPUs, GiB of each, bf16 TFLOPS, GB/s of memory, to neighbours, to others, to the host.
    "one H100 SXM": {"gpus": 1, "is": (79.6, 989.4, 3350, 64, 64, 64), "joined": 1},
    "8 x H100 SXM with NVSwitch": {"gpus": 8, "is": (79.6, 989.4, 3350, 450, 64, 64), "joined": 8},
    "H100 PCIe": {"gpus": 1, "is": (79.6, 756.5, 2000, 64, 64, 64), "joined": 1},
    "H100 NVL pair": {"gpus": 2, "is": (93.6, 835.5, 3900, 300, 64, 64), "joined": 2},
    "A100 PCIe 40 GB": {"gpus": 1, "is": (40, 312, 1555, 32, 32, 32), "joined": 1},
    # Through the host's memory: half of PCIe.
    "4 x L40S without peers": {"gpus": 4, "is": (45, 362.05, 864, 16, 16, 32), "joined": 1},
    # Eight lanes of the fourth generation, as in a desktop with two cards.
    "2 x RTX 4090": {"gpus": 2, "is": (24, 165.2, 1008, 8, 8, 16), "joined": 1},
    "GH200 with N/A memory": {"gpus": 1, "is": (96, 989.4, 4000, 64, 64, 450), "joined": 1},
    # Three of seven parts of the arithmetic, four of eight of the memory.
    "MIG 3g.40gb on H100": {"gpus": 1, "is": (39.5, 424.03, 1675, 64, 64, 64), "joined": 1},
    "8 x B200": {"gpus": 8, "is": (179.1, 2250, 8000, 900, 64, 64), "joined": 8},
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_the_driver_says_becomes_what_the_selector_plans_with(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install(monkeypatch, MACHINES[name])
    hardware, expected = read_hardware(), EXPECTED[name]
    assert module.open == 0
    assert hardware.gpus == expected["gpus"]
    assert hardware.gpu_name.startswith("NVIDIA ")
    # No measurement: all of them have a data sheet.
    assert with_figures(hardware) is hardware
    found = device_of(hardware)
    assert found.nvlink_gpus == expected["joined"]
    memory, flops, *rates = expected["is"]
    assert found.memory_bytes / 2**30 == pytest.approx(memory, abs=0.05)
    assert found.flops / 1e12 == pytest.approx(flops, rel=1e-4)
    assert [
        found.memory_bandwidth / 1e9,
        found.link_bandwidth / 1e9,
        found.peer_bandwidth / 1e9,
        found.host_bandwidth / 1e9,
    ] == pytest.approx(rates)
    assert found.layer_seconds > 0


def test_earl_plan_plans_for_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = {}
    for name, machine in MACHINES.items():
        install(monkeypatch, machine)
        asked = ["plan", "--explain", "--model", "smollm2-360m", "--hardware", "here"]
        result = CliRunner().invoke(app, [*asked, "--context", "2K"])
        assert result.exit_code == 0, result.output
        shown[name] = " ".join(result.output.split())
        assert f"on 1 x {len(machine.boards)} " in shown[name]
        assert "(NVIDIA " in shown[name], "the source of the figures"
    assert "on 1 x 8 H100-80GB" in shown["8 x H100 SXM with NVSwitch"]
    assert "450 GB/s links of 8 GPUs, 64 GB/s to others" in shown["8 x H100 SXM with NVSwitch"]
    assert "on 1 x 4 L40S" in shown["4 x L40S without peers"]
    assert "362.1 TFLOPS bf16, 0.86 TB/s memory, 16 GB/s links" in shown["4 x L40S without peers"]
    assert "on 1 x 1 NVIDIA H100 80GB HBM3 MIG 3g.40gb" in shown["MIG 3g.40gb on H100"]
    assert "1.68 TB/s memory" in shown["MIG 3g.40gb on H100"]


def test_pairs_in_a_host_of_four_are_no_ring_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    nvl = [
        replace(MACHINES["H100 NVL pair"].boards[0], uuid="", links=(n ^ 1,) * 12) for n in range(4)
    ]
    install(monkeypatch, Machine(nvl))
    hardware = read_hardware()
    line = Roofline(MODELS["qwen3-8b"], device_of(hardware), hardware)
    assert hardware.nvlink_gpus == 2
    assert (line.link(2), line.link(4)) == (300e9, 64e9)
    assert line.all_reduce(1e9, 4) > 6 * line.all_reduce(1e9, 2)
    # Two cards of different pairs have no bridge between them.
    install(monkeypatch, Machine(nvl), visible="0,2")
    assert read_hardware().nvlink_gpus == 1
    assert line.link(1) == 300e9


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["A", "B", "B"]),
        ("", []),
        ("-1", []),
        ("2,0", ["B", "A"]),
        ("1, 7, 0", ["B"]),
        ("0,-1,1", ["A"]),
        ("GPU-aa", ["A"]),
        ("GPU-bb", []),
        ("GPU-bb1,GPU-bb2", ["B", "B"]),
    ],
)
def test_gpus_that_cuda_hides_do_not_count(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, names: list[str]
) -> None:
    listed = [("GPU-aa0", "A", 1000), ("GPU-bb1", "B", 3000), ("GPU-bb2", "B", 2000)]
    boards = [replace(L40S, uuid=uuid, name=name, memory=size * MIB) for uuid, name, size in listed]
    install(monkeypatch, Machine(boards), chosen)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    found = read_hardware()
    assert found.gpus == len(names)
    assert found.gpu_name == (names[0] if names else "")
    sizes = {"A": 1000, "B": 2000 if chosen in (None, "GPU-bb1,GPU-bb2", "2,0") else 3000}
    assert found.gpu_memory_bytes == min((sizes[name] for name in names), default=0) * MIB


def test_gpus_of_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's control group leaves it the second of two."""
    machine = Machine([replace(H100, ours=False), L40S])
    install(monkeypatch, machine, "0")
    assert read_hardware().gpu_name == L40S.name
    assert [load.memory for load in gpus.gpu_loads()] == [2.0**30]


def test_the_order_of_gpus_that_differ_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Machine([L40S, RTX]))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    with pytest.raises(ConfigError, match="export CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        read_hardware()
    # A UUID names the same card in any order.
    install(monkeypatch, Machine([L40S, RTX]), "GPU-00000001")
    assert read_hardware().gpu_name == RTX.name


def test_of_a_gpu_in_mig_mode_cuda_shows_one_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    second = "MIG-00000001-aaaa-bbbb-cccc-000000000000"
    for chosen, profile, gib in (
        (None, "3g.40gb", 39.5),
        ("0", "3g.40gb", 39.5),
        (second, "2g.20gb", 19.6),
    ):
        install(monkeypatch, Machine([MIG]), chosen)
        found = read_hardware()
        assert found.gpus == 1
        assert found.gpu_name.endswith(profile)
        assert found.gpu_memory_bytes / 2**30 == pytest.approx(gib, abs=0.05)
    first = second.replace("MIG-00000001", "MIG-00000000")
    install(monkeypatch, Machine([MIG]), f"{first},{second}")
    with pytest.raises(ConfigError, match="CUDA gives a process one"):
        read_hardware()
    install(monkeypatch, Machine([replace(MIG, instances=())]))
    with pytest.raises(ConfigError, match="in MIG mode and has no instance"):
        read_hardware()


def test_cores_follow_the_gpus_that_they_are_next_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 is on the second socket: of equal parts, the first has that socket's cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)) | {70})
    monkeypatch.setattr(os, "cpu_count", lambda: 80)
    near = ((2, 3, 6, 7, 70), (0, 1, 4, 5))
    install(monkeypatch, Machine([replace(H100, near=cores) for cores in near]))
    whole = read_resources()
    assert whole.cores == (2, 3, 6, 7, 70, 0, 1, 4, 5)
    half = whole.part(1, 2)
    assert (half.first_gpu, half.nvlink_gpus) == (1, 1)
    assert set(half.cores) <= {70, 0, 1, 4, 5}


def test_the_least_compute_capability_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for boards, least in (
        ([H100], 9.0),
        ([replace(H100, capability=(8, 6)), H100], 8.6),
        ([replace(H100, capability=(7, 5))], 7.5),
        ([replace(H100, capability=(12, 0))], 12.0),
        ([replace(H100, capability=None)], 0.0),
        ([MIG], 0.0),
    ):
        install(monkeypatch, Machine(boards))
        assert read_resources().gpu_capability == least
    # A name in the catalogue says it as well.
    install(monkeypatch, Machine([MIG]))
    assert decide(local_hosts(1)).precision == "bf16"


REFUSALS = {
    "NVMLError_LibraryNotFound": "NVIDIA_DRIVER_CAPABILITIES",
    "NVMLError_DriverNotLoaded": "install the driver again",
    "NVMLError_LibRmVersionMismatch": "restart the machine",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_driver_that_cannot_be_asked_is_an_error_where_there_is_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, Machine([H100], refused=ERRORS[name]))
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    with pytest.raises(ConfigError, match=REFUSALS[name]) as caught:
        read_hardware()
    assert "export CUDA_VISIBLE_DEVICES=" in caught.value.remedy
    # Who hides the GPUs has none, whatever their driver is like.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_hardware().gpus == 0


def test_without_a_device_a_driver_that_is_missing_means_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    for name in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
        install(monkeypatch, Machine([H100], refused=ERRORS[name]))
        assert read_hardware().gpus == 0
        assert gpus.gpu_loads() == []
        assert gpus.driver_version() is None


def test_a_question_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, Machine([H100], broken=ERRORS["NVMLError_GpuIsLost"]))
    with pytest.raises(ConfigError, match="GPU is lost"):
        read_hardware()
    assert module.open == 0


def test_gpus_without_the_package_that_asks_for_them_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    assert read_hardware().gpus == 0
    (tmp_path / "nvidia0").touch()
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        read_hardware()


def test_the_stand_in_speaks_as_the_package_does() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name, value in CONSTANTS.items():
        assert getattr(real, name) == value, name
    for name in ERRORS:
        assert issubclass(getattr(real, name), real.NVMLError)
    for name in dir(Machine):
        if name.startswith("nvml"):
            assert callable(getattr(real, name)), name


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM-64GB", "NVIDIA H800", ""]
)
def test_no_gpu_is_taken_for_its_relative(name: str) -> None:
    hardware = Hardware(cpu_cores=8, memory_bytes=2**36, gpus=1, gpu_name=name)
    with pytest.raises(ConfigError, match="no figures are known"):
        device_of(hardware)


def test_every_data_sheet_is_reached_by_a_driver_name_and_its_own() -> None:
    for key, figures in DEVICES.items():
        found = device_of(cluster(key, 1, 8))
        assert found.flops == figures.flops
        assert found.memory_bandwidth == figures.memory_bandwidth
        assert "NVIDIA" in figures.source


def test_a_gpu_that_nobody_knows_is_measured_once(tmp_path: Path) -> None:
    """By a worker; here on the CPU, in place of the GPU that is not there."""
    hardware = Hardware(
        cpu_cores=2, memory_bytes=2**34, gpus=2, gpu_name="NVIDIA Unheard-Of", pcie_bandwidth=8e9,
        nvlink_gpus=2, nvlink_bandwidth=100e9,
    )  # fmt: skip
    found = with_figures(hardware, directory=str(tmp_path), device="cpu")
    figures = found.figures
    assert isinstance(figures, DeviceFigures)
    assert 1e8 < figures.flops < 1e14
    assert 1e8 < figures.float32_flops < 1e14
    assert 1e8 < figures.memory_bandwidth < 1e13
    assert 1e-6 < figures.layer_seconds < 1
    planned = device_of(found)
    assert planned.flops == figures.flops
    # The driver's word on links stands; PCIe is no faster than its slot.
    assert planned.link_bandwidth == 100e9
    assert planned.peer_bandwidth <= 8e9
    (kept,) = tmp_path.glob("device-nvidia-unheard-of-*.json")
    kept.write_text(kept.read_text().replace('"name": "CPU"', '"name": "kept"'))
    again = with_figures(hardware, directory=str(tmp_path), device="cpu").figures
    assert again is not None
    assert again.name == "kept"


def test_a_file_that_holds_no_figures_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    figures = DEVICES["h100-80gb"]
    monkeypatch.setattr(device_figures, "_measured", lambda hosts, device: figures)
    hardware = Hardware(cpu_cores=2, memory_bytes=2**34, gpus=1, gpu_name="NVIDIA Unheard-Of")
    with_figures(hardware, directory=str(tmp_path))
    (kept,) = tmp_path.glob("device-*.json")
    assert not caplog.messages
    for content in ("", "my notes", '{"name": "of another program"}'):
        kept.write_text(content)
        assert with_figures(hardware, directory=str(tmp_path)).figures == figures
        assert kept.read_text() == content
    assert len(caplog.messages) == 3
    assert f"{kept} does not hold the figures of a device" in caplog.text
