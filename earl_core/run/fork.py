"""A fork of a run: a run of its own that begins with a checkpoint of its parent.

It is made beside the runs and renamed into place when it is whole. It has the parent's checkpoint,
with the optimizer's state and the cursors that came to it, the sealed stages, metrics and episodes
up to there, and what the run began with. What the parent did later is inherited
(`run.inherited_stages`). Files that are never written again share their bytes where the file system
allows it, so the parent may be removed afterwards.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from earl_core.config import ConfigError, RunConfig
from earl_core.config.load import dump_config
from earl_core.config.run import KEPT_ADAPTER, KEPT_ANCESTOR, KEPT_REFERENCES
from earl_core.dispatch.segments.pool_directory import new_uid
from earl_core.run.branches import BRANCHES, Branches
from earl_core.run.checkpoints import MARKER, read_state, state_path
from earl_core.run.episodes import NAME, PROBE_NAME
from earl_core.run.inherited_stages import copy_seal, inherit
from earl_core.run.policy_versions import PolicyVersions
from earl_core.run.record import (
    FORKED,
    STALENESS,
    Journal,
    key_uid,
    lineage,
    noted_staleness,
    read_record,
    write_record,
)
from earl_core.run.recovery import lines_through
from earl_core.run.saved_versions import FOLDER
from earl_core.system import fault_points
from earl_core.system.files import (
    canonical_json,
    link_or_copy,
    make_directory,
    read_file,
    sync,
    write_atomic,
)

_BUILDING = ".forks"
"""Among the runs; two levels below it nobody looks for runs."""

_JOURNALS = ("metrics.jsonl", "selector.jsonl")
_NOTED = ("ancestor", "adapter", "references", "precision", "selector")
"""What run.json says of the models that a run keeps, and of what `auto` was when it began."""


def make_fork(parent: Path, iteration: int, config: RunConfig) -> Path:
    """Make a run directory that goes on after a checkpoint of another run; returns its path.

    iteration: the checkpoint's, which the caller holds (`holding_checkpoint`) and has verified.
    config: the fork's; its name and runs_directory say where. Whole or not at all, whenever this
    process is killed. Raises `ConfigError` where something lies there, `RunDamaged`, `OSError`.
    """
    target = Path(config.runs_directory) / config.name
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already: choose another name for the fork")
    record, uid = read_record(parent), new_uid()
    # One of its own: another process may be making a fork of this name, too.
    building = target.parent / _BUILDING / f"{config.name}.{uid}"
    make_directory(building, mode=0o700)
    try:
        _fill(building, parent, record, uid, iteration, config)
        fault_points.point("fork.made", iteration)
        _rename(building, target)
    except BaseException:
        # Of a full disk, for instance; what a killed process leaves is nobody's to judge.
        shutil.rmtree(building, ignore_errors=True)
        raise
    finally:
        with suppress(OSError):
            building.parent.rmdir()
    return target


def _fill(
    building: Path, parent: Path, record: dict[str, Any], uid: str, last: int, config: RunConfig
) -> None:
    """Write all that the fork begins with, down to the disk."""
    _copy_past(parent, building, uid, last)
    inherit(parent, building, uid, last)
    write_atomic(building / "config.yaml", dump_config(config).encode())
    forked = _record(parent, record, uid, last)
    write_record(building, forked)
    told = {"time": round(time.time(), 3), "attempt": 0, "iteration": last, "stage": "run"}
    event = f"forked from {forked[FORKED]['from']}"
    Journal(building / "ledger.jsonl").append({**told, "event": event})
    sync(building)


def _copy_past(parent: Path, building: Path, uid: str, last: int) -> None:
    for name in _JOURNALS:
        write_atomic(building / name, lines_through(parent / name, last))
    for name in (KEPT_ANCESTOR, KEPT_ADAPTER, KEPT_REFERENCES, FOLDER):
        if (parent / name).is_dir():
            _copy_tree(parent / name, building / name)
    # What was asked before is compared with what is answered from now on.
    if (parent / PROBE_NAME).is_file():
        link_or_copy(parent / PROBE_NAME, building / PROBE_NAME)
    checkpoint = Path("checkpoints") / f"{last:06d}"
    _copy_tree(parent / checkpoint, building / checkpoint)
    # Whoever holds the parent's checkpoint locks this file.
    marker = building / checkpoint / MARKER
    marker.unlink()
    write_atomic(marker, read_file(parent / checkpoint / MARKER))
    for folder in sorted((parent / "iterations").glob("[0-9]*")):
        if not folder.name.isdigit() or int(folder.name) > last:
            continue
        place = building / "iterations" / folder.name
        make_directory(place)
        for path in folder.iterdir():
            if path.suffix == ".json" and copy_seal(path, place / path.name, uid):
                (place / path.name).with_suffix(".released").touch()
            elif path.suffix == ".input" or path.name == NAME:
                link_or_copy(path, place / path.name)
        sync(place)


def _copy_tree(source: Path, target: Path) -> None:
    make_directory(target.parent)
    shutil.copytree(source, target, symlinks=True, copy_function=link_or_copy)
    for folder, _, files in os.walk(target):
        for name in (*files, "."):
            sync(Path(folder) / name)


def _record(parent: Path, record: dict[str, Any], uid: str, iteration: int) -> dict[str, Any]:
    checkpoint = parent / "checkpoints" / f"{iteration:06d}"
    critic = state_path(checkpoint, "critic")
    forked = {
        "from": f"{parent.name}@{iteration}",
        "name": parent.resolve().name,
        "path": str(parent.resolve()),
        "uid": record["uid"],
        "iteration": iteration,
        "policy_version": PolicyVersions(parent).update(iteration).made,
        "digest": _digest(checkpoint),
        **({"critic_digest": _digest(critic)} if critic.is_dir() else {}),
        "keys": key_uid(record),
        "ancestors": [
            {k: v for k, v in each.items() if k not in ("ancestors", "keys")}
            for each in lineage(record)
        ],
    }
    noted = {name: record[name] for name in _NOTED if name in record}
    staleness = noted_staleness(record)
    past: dict[str, Any] = {} if staleness is None else {STALENESS: staleness}
    if opened := Branches.of(record).through(iteration).opened:
        # What was set aside stays with the parent.
        own = (each.model_copy(update={"set_aside": "", "pending": False}) for each in opened)
        past[BRANCHES] = Branches(tuple(own)).dump()
    return {"uid": uid, "attempts": 0, FORKED: forked, **noted, **past}


def _digest(state: Path) -> str:
    """Of all files of a training state, by their names and checksums."""
    files = read_state(state)["files"]
    sums = {name: listed["xxh3"] for name, listed in files.items()}
    return xxhash.xxh3_128_hexdigest(canonical_json(sums))


def _rename(building: Path, target: Path) -> None:
    try:
        os.rename(building, target)
    except OSError as error:
        # A directory that appeared meanwhile, and is not empty.
        raise ConfigError(f"{target} exists already: choose another name for the fork") from error
    sync(target.parent)
