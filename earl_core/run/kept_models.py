"""Models that a run keeps in its directory: its ancestor, the adapter that it began with, teachers.

The folder of each has `model/`, a copy or a link, and a file that says what it is, with the
checksum of every file of it. A model that is not what was written is never begun with.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from earl_core.pretrained.adapter_directory import is_adapter
from earl_core.pretrained.model_directory import needed_files
from earl_core.run.checkpoints import file_checksum
from earl_core.run.record import RunDamaged
from earl_core.system import fault_points
from earl_core.system.files import (
    canonical_json,
    link_or_copy,
    make_directory,
    sync,
    write_atomic,
)

_RECORD = "ancestor.json"


def keep(
    source: Path,
    place: Path,
    record: Mapping[str, Any],
    sums: Mapping[str, str] | None = None,
    by_link: bool = False,
) -> dict[str, Any]:
    """Copy a model, or an adapter, to a folder of the run directory, whole or not at all.

    sums: checksums of its files by name, of one whose files are never written again: the copy may
    share their bytes. by_link: it is not copied but named by a symbolic link. Returns the record
    with the files' `digest`. Raises `OSError`.
    """
    building = place.with_name(f".{place.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    if by_link:
        make_directory(building)
        (building / "model").symlink_to(source.resolve(), target_is_directory=True)
    else:
        make_directory(building / "model")
    snapshot, files = _is_hub_snapshot(source), {}
    for name in sorted(sums or _needed(source)):
        target = building / "model" / name
        if not by_link:
            make_directory(target.parent)
            # Whoever owns a model directory may write into its files.
            copy = link_or_copy if sums or snapshot else shutil.copyfile
            copy(source / name, target)
            sync(target)
        files[name] = file_checksum(target)
        if sums and files[name] != sums[name]:
            raise OSError(f"the copy of {source / name} has other bytes: begin again")
    digest = xxhash.xxh3_128_hexdigest(canonical_json(files))
    told = {**record, "digest": digest}
    if snapshot:
        told["revision"] = source.resolve().name
    content = {"record": told, "files": {name: {"xxh3": each} for name, each in files.items()}}
    write_atomic(building / _RECORD, json.dumps(content, indent=1).encode())
    if not by_link:
        sync(building / "model")
    make_directory(place.parent)
    fault_points.point("ancestor.copied", 0)
    os.rename(building, place)
    sync(place.parent)
    return told


def kept_record(place: Path) -> dict[str, Any]:
    """The record of a kept model, all bytes of which are read; raises `RunDamaged` where it is not
    as it was written."""
    try:
        kept: dict[str, Any] = json.loads((place / _RECORD).read_text(encoding="utf-8"))
        record: dict[str, Any] = kept["record"]
        changed = [
            name
            for name, listed in kept["files"].items()
            if file_checksum(place / "model" / name) != listed["xxh3"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDamaged(f"{place} is damaged: {error}; put it back as it was") from error
    if changed:
        lying = (place / "model" / changed[0]).resolve()
        raise RunDamaged(f"{lying} is not what the run began with: put it back as it was")
    return record


def check_noted(place: Path, record: Mapping[str, Any], noted: Mapping[str, Any] | None) -> None:
    """Raise `RunDamaged` where `run.json` has noted another model than the one kept there."""
    if noted is not None and noted["digest"] != record["digest"]:
        raise RunDamaged(f"{place} is not what the run began with: put it back as it was")


def _needed(source: Path) -> list[str]:
    if is_adapter(source):
        return [path.name for path in source.glob("adapter_*")]
    return needed_files(os.listdir(source))


def _is_hub_snapshot(directory: Path) -> bool:
    """True for files of huggingface_hub's cache, whose names are their contents'."""
    return directory.resolve().parent.name == "snapshots"
