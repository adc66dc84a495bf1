"""The directory in shared memory that is this user's alone: where stores lie unless told otherwise.

Shared memory is writable for everyone, so its name says whose it is, and it is used only when
nobody else can have put anything into it.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from earl_core.system.errors import NotOurs


def user_directory() -> Path:
    """`/dev/shm/earl-<user id>`."""
    return Path(f"/dev/shm/earl-{os.geteuid()}")


def check_user_directory(path: Path) -> None:
    """Raise `NotOurs` when `path` is this user's directory and others could reach into it.

    Nothing is asked of another directory: whoever names it chose it.
    """
    if path != user_directory():
        return
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        wrong = "is a link or a file, not a folder"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}"
    elif mode & 0o077:
        wrong = f"is open to others (mode {mode:04o})"
    else:
        return
    raise NotOurs(
        f"{path}, where shards of this user lie, {wrong}",
        remedy="remove it, or set dispatch.directory to another folder on tmpfs",
    )


def make_parent(directory: Path) -> None:
    """Make the directory that `directory` lies in, mode 0700. Raises as `check_user_directory`."""
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_user_directory(directory.parent)


def remove_when_empty(path: Path) -> None:
    """Remove this user's directory when nothing lies in it; no other directory."""
    if path == user_directory():
        with suppress(OSError):
            path.rmdir()
