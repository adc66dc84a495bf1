"""Cores, memory, disk and limits of this machine; its GPUs."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from earl_core.cluster.host import local_hosts
from earl_core.control.hardware import read_hardware
from earl_core.control.precision import decide
from earl_core.deployment.shapes import Hardware
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.files import existing
from earl_core.system.finding import Finding, judged, refused
from flows.cli.checks.gpus import check_gpus

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
