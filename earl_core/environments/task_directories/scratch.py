"""The folder of an episode: made, and removed with all that the episode left in it.

A lock that its process holds marks it, so that what a killed process left is found and removed, and
nothing else.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from earl_core.environments.tools.sandbox import view
from earl_core.system.errors import NotOurs
from earl_core.system.removal import remove_tree

logger = logging.getLogger(__name__)

_ROUNDS, _PAUSE_SECONDS = 40, 0.05


def base() -> Path:
    """The folder of this user's folders, which no episode sees."""
    return Path(os.path.realpath(tempfile.gettempdir())) / f"earl-tasks-{os.geteuid()}"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder of this process's, which is removed at the end. Raises `NotOurs` where another
    user has made the folder that it lies in."""
    while True:
        try:
            base().mkdir(mode=0o700, exist_ok=True)
            _check_ours(base())
            folder = Path(tempfile.mkdtemp(dir=base()))
        except FileNotFoundError:  # the last other one has just gone
            continue
        held = _lock(folder)
        # A sweep may have come between.
        if held is not None and folder.exists():
            break
    try:
        yield folder
    finally:
        try:
            remove(folder)
        finally:
            os.close(held)
        with suppress(OSError):
            base().rmdir()


def sweep() -> None:
    """Remove the folders of processes that are no more."""
    with suppress(FileNotFoundError):
        _check_ours(base())
        for folder in base().iterdir():
            held = _lock(folder)
            if held is not None:
                try:
                    remove(folder)
                finally:
                    os.close(held)
        with suppress(OSError):
            base().rmdir()


def _check_ours(folder: Path) -> None:
    found = os.lstat(folder)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or found.st_mode & 0o077:
        raise NotOurs(f"{folder} is not this user's alone", remedy="remove it, or set TMPDIR")


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock, None where another process has it, or the folder went."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove(folder: Path) -> None:
    """Remove a folder, also what nobody may enter; a warning tells of one that stays. Files of
    other mounts are never reached."""
    for _ in range(_ROUNDS):
        if not view.mounts_below(os.path.realpath(folder)):
            remove_tree(folder)
            if not os.path.lexists(folder):
                return
        time.sleep(_PAUSE_SECONDS)
    logger.warning("%s cannot be removed", folder)
