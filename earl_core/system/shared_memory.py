"""How much room the shared memory of this machine, or of its container, has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from earl_core.system.files import existing

SMALL_BYTES = 2**30
"""Below this a run may not find room for its shards and weights; Docker gives 64 MB."""

ENLARGE = (
    "enlarge it: `mount -o remount,size=8G /dev/shm`, or with Docker `--shm-size=8g`; or set "
    "dispatch.directory to another tmpfs"
)

_GIB = 2**30


class Room(NamedTuple):
    """Bytes of the file system at `place`. Prints as a person reads it."""

    place: Path
    free: int
    size: int

    def __str__(self) -> str:
        return f"{self.free / _GIB:.2g} of {self.size / _GIB:.2g} GiB are free in {self.place}"


def room_in(directory: str | Path) -> Room:
    """Of the file system that a directory lies on, or would lie on."""
    place = existing(Path(directory).absolute())
    status = os.statvfs(place)
    return Room(place, status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)
