"""The mark of a store: what tells a directory of ours from one of anybody else.

A store's first file says format, store and user. It is written into a directory that was empty, so
that whatever lies beside it came later, and it is checked by content: a copied, renamed or foreign
directory does not pass. Only in a marked directory is anything ever removed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from earl_core.dispatch.segments.names import MARK, is_unfinished_mark, own_status
from earl_core.system.errors import NotOurs
from earl_core.system.files import read_file, write_atomic
from earl_core.system.user_directory import make_parent

_FORMAT = "earl.store/1"


@dataclass(frozen=True)
class StoreMark:
    """What a mark says. run_directory: of the run whose store it is; None where no run owns it.

    time: when the run last claimed it, in seconds since 1970.
    """

    run_directory: Path | None
    time: float


def read_mark(directory: Path) -> StoreMark | None:
    """The mark of a directory of this user that is a store; None for any other directory."""
    try:
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        if own_status(directory / MARK) is None:
            return None
        content = json.loads(read_file(directory / MARK))
        whose = (content["format"], content["store"], content["user"])
        if whose != (_FORMAT, _name(directory), os.geteuid()):
            return None
        owner = content["run_directory"]
        return StoreMark(Path(owner) if owner is not None else None, float(content["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_store(directory: Path) -> None:
    """Make a store's directory, mode 0700, and mark it; nothing happens to one that is marked.

    Raises `NotOurs` for a link, a directory of another user, or one that holds anything, and when
    the user's directory is not the user's alone; other `OSError` when it cannot be made.
    """
    make_parent(directory)
    if read_mark(directory) is not None:
        return
    try:
        directory.mkdir(mode=0o700)
    except FileNotFoundError:
        # Another run, the last one in it, has just removed the parent.
        return make_store(directory)
    except FileExistsError:
        _check_empty(directory)
        if read_mark(directory) is not None:
            return  # another process of the run was faster
        directory.chmod(0o700)
    write_mark(directory, None)


def write_mark(directory: Path, run_directory: Path | None) -> None:
    """Say, atomically, whose store this is from now on."""
    content = {
        "format": _FORMAT,
        "store": _name(directory),
        "user": os.geteuid(),
        "run_directory": str(run_directory) if run_directory is not None else None,
        "time": time.time(),
    }
    write_atomic(directory / MARK, json.dumps(content).encode())


def _check_empty(directory: Path) -> None:
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise NotOurs(errno.ENOTDIR, f"{directory} is a link or a file, not a folder: remove it")
    if status.st_uid != os.geteuid():
        raise NotOurs(errno.EPERM, f"{directory} belongs to another user: choose another folder")
    # What a process that was killed while it wrote the mark left.
    left = [name for name in os.listdir(directory) if not is_unfinished_mark(name)]
    if left and read_mark(directory) is None:
        raise NotOurs(
            errno.ENOTEMPTY,
            f"{directory} holds files that are not of a store, such as {left[0]}: move them away, "
            "or choose another folder",
        )


def _name(directory: Path) -> str:
    return Path(os.path.abspath(directory)).name
