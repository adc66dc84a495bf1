"""Room in the shared memory of this machine, or of its container."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

from earl_core.system.files import existing

SMALL_BYTES = 2**30
"""Below this a run may not find room for its shards and weights; Docker gives 64 MB."""

VERSIONS = 2
"""Sets of published weights that must fit beside each other: one is in use while the next is
written. Stale rollouts (`schedule.staleness`) play older ones, too."""

SHARE = 0.75
"""Share that shards may take of the file system beside the weights, unless a number is given. vLLM,
NCCL and torch keep files there too, and whoever writes to a page that a full file system cannot
give is killed by SIGBUS."""

_GIB = 2**30


class Need(NamedTuple):
    """Bytes that a run keeps in the shared memory of each host. version: one set of published
    weights. samples: the shards of the iterations between two checkpoints. versions: sets of
    weights that must fit beside each other."""

    version: int
    samples: int
    versions: int = VERSIONS

    @property
    def counted(self) -> str:
        """The number of versions, in words."""
        return f"{'two' if self.versions == 2 else self.versions} versions"

    @property
    def weights(self) -> int:
        """Bytes of all versions."""
        return self.versions * self.version

    @property
    def size(self) -> int:
        """Bytes of the smallest file system that is large enough."""
        return self.weights + round(self.samples / SHARE)


def enlarge(size: int = 0) -> str:
    """Advise on shared memory that is smaller than `size` bytes; 8 GiB are a good size."""
    gib = max(8, math.ceil(size / _GIB))
    return (
        f"enlarge it: `mount -o remount,size={gib}G /dev/shm`, or with Docker `--shm-size={gib}g`; "
        "or set dispatch.directory to another tmpfs, or to a disk, which is slower"
    )


class Room(NamedTuple):
    """Bytes of the file system at `place`. Prints as a person reads it."""

    place: Path
    free: int
    size: int

    def __str__(self) -> str:
        return f"{self.free / _GIB:.2g} of {self.size / _GIB:.2g} GiB are free in {self.place}"


def shards_limit(max_bytes: int | None, size: int | None, weights: int) -> int:
    """Bytes that shards may have on a file system of so many bytes (None: without a limit) beside
    `weights` bytes of all versions. max_bytes: the number that was given."""
    if max_bytes is not None:
        return max_bytes
    return sys.maxsize if size is None else int(SHARE * max(0, size - weights))


def file_system_bytes(directory: Path) -> int | None:
    """Size of the file system of a directory; None where it has no limit."""
    status = os.statvfs(directory)
    # A tmpfs without a limit reports no blocks at all.
    return status.f_blocks * status.f_frsize or None


def room_in(directory: str | Path) -> Room:
    """Return the room of the file system that a directory lies on, or would lie on."""
    place = existing(Path(directory).absolute())
    status = os.statvfs(place)
    return Room(place, status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)
