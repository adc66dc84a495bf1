"""Removal of folders that code of somebody else's has filled."""

from __future__ import annotations

import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path


def remove_tree(folder: str | Path) -> None:
    """Remove a folder with all in it, also what nobody may enter. It raises nothing: what cannot be
    removed stays. Links are not followed.

    `shutil.rmtree` calls itself for each level, and paths have an end, so inner folders are moved
    up before they are emptied.
    """
    waiting = [str(folder)]
    while waiting:
        place = waiting.pop()
        for entry in _entries(place):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    moved = os.path.join(folder, uuid.uuid4().hex)
                    # A folder that changes its parent is written to.
                    os.chmod(entry.path, stat.S_IRWXU)
                    os.rename(entry.path, moved)
                    waiting.append(moved)
                else:
                    os.unlink(entry.path)
        if place != str(folder):
            with suppress(OSError):
                os.rmdir(place)
    with suppress(OSError):
        os.rmdir(folder)


def _entries(place: str) -> list[os.DirEntry[str]]:
    with suppress(OSError):
        os.chmod(place, stat.S_IRWXU)
    try:
        with os.scandir(place) as found:
            return list(found)
    except OSError:
        return []
