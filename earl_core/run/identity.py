"""Which run a directory is: its uid, and the place where it lies, so that a copy is noticed.

A copied directory keeps the uid: opened, it would release the original's shards and write into the
original's tracked run. So `run.json` notes path, device and inode of its directory. A directory
that was renamed has the same inode; one that was moved to another file system or mounted elsewhere
has another, but nothing lies at the noted place any more. Only where the noted place still holds
the same uid is it a copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earl_core.config import ConfigError
from earl_core.dispatch.segments.names import is_uid
from earl_core.run.record import RunDamaged, read_record


def read_uid(run_directory: str | Path) -> str:
    """The uid of the run in this directory, fit to become a part of a path.

    Raises `RunDamaged`, and `FileNotFoundError` where no run is.
    """
    return checked_uid(read_record(Path(run_directory)), Path(run_directory))


def checked_uid(record: Mapping[str, Any], run_directory: Path) -> str:
    """The uid in a run's record; raises `RunDamaged` for anything that is none."""
    uid = record.get("uid")
    if not is_uid(uid):
        raise RunDamaged(
            f"{run_directory / 'run.json'} is damaged: its uid is {uid!r} and not twelve "
            "hexadecimal digits; start a new run under another name"
        )
    return str(uid)


def place_of(run_directory: Path) -> dict[str, Any]:
    """Where a run lies, as run.json notes it."""
    status = run_directory.stat()
    path = str(run_directory.resolve())
    return {"path": path, "device": status.st_dev, "inode": status.st_ino}


def check_not_copied(run_directory: Path, uid: str, noted: Mapping[str, Any] | None) -> None:
    """Raise `ConfigError` when this directory is a copy of the one whose place was noted.

    noted: from `place_of`, perhaps of an earlier attempt; None where nothing was noted.
    """
    here = place_of(run_directory)
    if noted is None or all(noted[key] == here[key] for key in ("device", "inode")):
        return
    check_other_place(run_directory, uid, Path(noted["path"]))


def check_other_place(run_directory: Path, uid: str, other: Path) -> None:
    """Raise `ConfigError` when another directory than this one holds the same run."""
    if not _holds(other, uid) or _same(other, run_directory):
        return
    raise ConfigError(
        f"{run_directory} is a copy of the run in {other}, and two directories cannot share one "
        f"run's shards and tracking: go on with {other}; or move it away, and the copy takes its "
        "place; or start a new run from the copy's weights, with another --name and --set "
        f"model.path={run_directory}/checkpoints/<iteration>/policy"
    )


def _holds(directory: Path, uid: str) -> bool:
    try:
        return bool(read_record(directory).get("uid") == uid)
    except (OSError, RunDamaged):
        return False


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
