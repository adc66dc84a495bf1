"""Shared memory: its size, and what earlier runs left in it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from earl_core.config import ConfigError, RunConfig
from earl_core.config.services import DispatchConfig
from earl_core.control.hardware import read_hardware
from earl_core.control.shared_memory_need import judged_room, need_of
from earl_core.run.run_stores import list_stores, run_store
from earl_core.selector.model.memory_model import gib
from earl_core.system.errors import EarlError, NotOurs
from earl_core.system.files import check_user_directory
from earl_core.system.finding import Finding, Level, judged, refused
from earl_core.system.shared_memory import SMALL_BYTES, Room, enlarge, room_in
from flows.cli.shards import shards_command

_MIB = 2**20
_BLOCKING = 128 * _MIB
_VLLM_PLACE, _VLLM_QUEUE = Path("/dev/shm"), 240 * _MIB
"""Place of the queue of a vLLM worker's answers, wherever `dispatch.directory` is, and its size,
which is no setting."""
_FOREIGN = ("psm_*", "sem.loky-*", "vllm_dist_*")


def check_shared_memory(config: RunConfig | None) -> Iterator[Finding]:
    """The file system of dispatch.directory and the folders in it."""
    dispatch = config.dispatch if config is not None else DispatchConfig()
    directory = Path(dispatch.directory).absolute()
    room = room_in(directory)
    place = room.place
    sweep = shards_command("sweep", directory)
    try:
        check_user_directory(directory)
    except NotOurs as error:
        yield refused(error)
        return
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "set dispatch.directory to a folder you can write, best on tmpfs"
        yield Finding("blocks", f"{place} is not writable", advice)
    else:
        level: Level = "blocks" if room.free < _BLOCKING else "warning"
        yield judged(room.free >= SMALL_BYTES, str(room), f"`{sweep}`, or {enlarge()}", level)
        if config is not None:
            yield from _vllm(config)
            if (Path(config.model.path) / "config.json").is_file():
                yield from _needed(config, room)
    kind = _file_system(place)
    if kind not in ("tmpfs", "ramfs", ""):
        advice = "shards work on a disk but are slow; set dispatch.directory to a folder on tmpfs"
        yield Finding("warning", f"{place} is on {kind}, not in memory", advice)
    yield from _leftovers(directory)


def require_room(config: RunConfig) -> None:
    """Raise `ConfigError` at once, not after minutes, where vLLM does not start in this machine's
    shared memory, or the weights of a model that is there do not fit."""
    findings = list(_vllm(config))
    if (Path(config.model.path) / "config.json").is_file():
        findings += _needed(config, room_in(Path(config.dispatch.directory).absolute()))
    for finding in findings:
        if finding.level == "blocks":
            raise ConfigError(finding.text, remedy=finding.advice)


def _vllm(config: RunConfig) -> Iterator[Finding]:
    """Check that vLLM's processes can talk: on a CPU each engine has several."""
    if config.rollout.engine != "vllm" or read_hardware().gpus:
        return
    room = room_in(_VLLM_PLACE)
    if room.free < _VLLM_QUEUE:
        text = f"vLLM needs {gib(_VLLM_QUEUE)} for the queue between its processes: {room}"
        advice = enlarge().partition("; or")[0]
        yield Finding("blocks", text, f"{advice}; or set rollout.engine=torch")


def _needed(config: RunConfig, room: Room) -> Iterator[Finding]:
    """Check that weights and samples of the run file fit."""
    run = Path(config.runs_directory) / config.name
    with suppress(EarlError, OSError):  # a run that cannot be opened is another part's to show
        pool = run_store(run, config).pool
        if pool.is_marked() and (own := pool.room_for_weights()) is not None:
            room = room._replace(free=own)
    try:
        need = need_of(config)
    except ConfigError as error:
        yield refused(error)
        return
    findings = list(judged_room(need, room, config.dispatch.max_bytes))
    text = f"{need.counted} of the weights, {gib(need.weights)}, and {gib(need.samples)} of samples"
    yield from findings or [Finding("good", f"{text} fit")]


def _leftovers(directory: Path) -> Iterator[Finding]:
    for store in list_stores(directory):
        size = f"{store.bytes / _MIB:.0f} MiB"
        if store.live:
            yield Finding("note", f"{size} of the running run {store.run_directory}")
        elif store.finished:
            advice = f"the next run removes them, or: {shards_command('sweep', directory)}"
            text = f"{size} in {store.directory} belong to no run any more"
            yield Finding("warning", text, advice)
        else:
            text = f"{size} of the stopped run {store.run_directory}"
            yield Finding("note", text, f"earl resume {shlex.quote(str(store.run_directory))}")
    foreign = [path for form in _FOREIGN for path in Path("/dev/shm").glob(form)]
    if foreign:
        size = f"{sum(path.stat().st_size for path in foreign if path.exists()) / _MIB:.0f} MiB"
        text = f"{len(foreign)} entries of other libraries ({size}), such as {foreign[0]}"
        advice = "they belong to running vLLM engines; if none runs, remove them"
        yield Finding("note", text, advice)


def _file_system(place: Path) -> str:
    """The type of the file system at a path; empty when it is not known."""
    mounts = [m for m in psutil.disk_partitions(all=True) if place.is_relative_to(m.mountpoint)]
    # Of two at one place, the later one hides the other.
    return max(reversed(mounts), key=lambda m: len(m.mountpoint)).fstype if mounts else ""
