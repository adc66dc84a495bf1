"""Shared memory: its size, and what earlier runs left in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from earl_core.config import RunConfig
from earl_core.config.services import DispatchConfig
from earl_core.run.shards import list_stores
from earl_core.system.user_directory import NotPrivate, check_user_directory
from flows.cli.checks.finding import Finding
from flows.cli.checks.machine import existing
from flows.cli.shards import shards_command

TOPIC = "Shared memory"

_MIB, _GIB = 2**20, 2**30
_BLOCKING, _SMALL = 128 * _MIB, _GIB
_ENLARGE = (
    "enlarge it: `mount -o remount,size=8G /dev/shm`, or with Docker `--shm-size=8g`; or set "
    "dispatch.directory to another tmpfs"
)
_FOREIGN = ("psm_*", "sem.loky-*", "vllm_dist_*")


def check_shared_memory(config: RunConfig | None) -> Iterator[Finding]:
    """The file system of dispatch.directory and the folders in it."""
    dispatch = config.dispatch if config is not None else DispatchConfig()
    directory = Path(dispatch.directory).absolute()
    place = existing(directory)
    sweep = shards_command("sweep", directory)
    status = os.statvfs(place)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{free / _GIB:.1f} of {size / _GIB:.1f} GiB are free in {place}"
    try:
        check_user_directory(directory)
    except NotPrivate as error:
        yield Finding("blocks", TOPIC, str(error.strerror), "")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "set dispatch.directory to a folder you can write, best on tmpfs"
        yield Finding("blocks", TOPIC, f"{place} is not writable", advice)
    elif free < _BLOCKING:
        yield Finding("blocks", TOPIC, text, f"`{sweep}`, or {_ENLARGE}")
    elif free < _SMALL:
        yield Finding("warning", TOPIC, text, f"`{sweep}`, or {_ENLARGE}")
    else:
        yield Finding("good", TOPIC, text)
    if _file_system(place) not in ("tmpfs", "ramfs", ""):
        yield Finding(
            "warning",
            TOPIC,
            f"{place} is on {_file_system(place)}, not in memory",
            "shards work on a disk but are slow; set dispatch.directory to a folder on tmpfs",
        )
    yield from _leftovers(directory)


def _leftovers(directory: Path) -> Iterator[Finding]:
    for store in list_stores(directory):
        size = f"{store.bytes / _MIB:.0f} MiB"
        if store.live:
            yield Finding("note", TOPIC, f"{size} of the running run {store.run_directory}")
        elif store.finished:
            text = f"{size} in {store.directory} belong to no run any more"
            advice = f"the next run removes them, or: {shards_command('sweep', directory)}"
            yield Finding("warning", TOPIC, text, advice)
        else:
            text = f"{size} of the stopped run {store.run_directory}"
            yield Finding("note", TOPIC, text, f"earl resume {store.run_directory}")
    foreign = [path for form in _FOREIGN for path in Path("/dev/shm").glob(form)]
    if foreign:
        size = f"{sum(path.stat().st_size for path in foreign if path.exists()) / _MIB:.0f} MiB"
        yield Finding(
            "note",
            TOPIC,
            f"{len(foreign)} entries of other libraries ({size}), such as {foreign[0]}",
            "they belong to running vLLM engines; if none runs, remove them",
        )


def _file_system(place: Path) -> str:
    """The type of the file system at a path; empty when it is not known."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        parts = line.split()
        inside = parts[1] == "/" or place.is_relative_to(parts[1])
        if inside and len(parts[1]) >= len(best):
            best, kind = parts[1], parts[2]
    return kind
