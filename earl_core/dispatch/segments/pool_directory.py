"""The directory of a pool: what names mean, what lies there, and the lock for new bytes."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import time
from pathlib import Path

from earl_core.dispatch.segments.mark import make_store, read_mark
from earl_core.dispatch.segments.names import (
    MARK,
    POOL_LOCK,
    is_own_file,
    own_status,
    writer_of,
)
from earl_core.system.locks import FileLock
from earl_core.system.process_identity import ProcessId

FREE = ".free."
WRITING = ".writing."
SEGMENT_MODE = 0o1600
SMALLEST = max(16 * 1024, 4 * mmap.PAGESIZE)
"""Bytes of the least segment. Sizes come in four classes per octave, so that a recycled segment
fits the next shard."""
_LOCK_SECONDS = 30.0  # the lock is held for microseconds; only a stopped process keeps it


class PoolDirectory:
    """Names and sizes of a pool's files. A segment's state is its name."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._marked: tuple[int, int] | None = None

    def make(self) -> None:
        """Make and mark the directory. Raises `OSError` for one that cannot be a store."""
        if not self.is_marked():
            make_store(self.directory)

    def is_marked(self) -> bool:
        """Whether it is a store of ours, so that files may be removed from it."""
        try:
            status = os.lstat(self.directory)
        except OSError:
            return False
        # Looked at once: whatever takes a store's place is another inode.
        if self._marked != (status.st_dev, status.st_ino):
            self._marked = None
            if read_mark(self.directory) is not None:
                self._marked = (status.st_dev, status.st_ino)
        return self._marked is not None

    def own(self, name: str) -> Path | None:
        """The path of a regular file of this user in a marked directory; None otherwise."""
        path = self.directory / name
        return path if self.is_marked() and own_status(path) is not None else None

    def free_path(self, status: os.stat_result) -> Path:
        """The name of this segment while it is free: it follows from the inode."""
        return self.directory / f"{FREE}{status.st_size}.{status.st_ino}"

    def new_writing_path(self) -> tuple[Path, int]:
        """A name in state writing of this process, and the generation in it."""
        generation = _identity.next_generation()
        return self.directory / f"{WRITING}{_identity.process()}.{generation}", generation

    def names(self, prefix: str = "") -> list[str]:
        """Names of the files, hidden ones included; empty without a directory."""
        try:
            return [name for name in os.listdir(self.directory) if name.startswith(prefix)]
        except FileNotFoundError:
            return []

    def free(self) -> list[tuple[int, str]]:
        """Size and name of the free segments, ascending."""
        found = []
        for name in self.names(FREE):
            status = own_status(self.directory / name)
            if status is not None and self.free_path(status).name == name:
                found.append((status.st_size, name))
        return sorted(found)

    def dead_writing(self) -> list[Path]:
        """Files in state writing whose process is gone."""
        dead = []
        for name in self.names(WRITING):
            text = writer_of(name)
            owner = ProcessId.parse(text) if text is not None else None
            if owner is not None and not owner.alive() and self.own(name) is not None:
                dead.append(self.directory / name)
        return dead

    def used_bytes(self) -> int:
        """Bytes of all files but the mark that lie here at one moment, while others rename them."""
        sizes: dict[int, int] = {}
        unknown = self._listing()
        while unknown:
            moved = []
            for inode, name in unknown.items():
                try:
                    sizes[inode] = os.lstat(self.directory / name).st_size
                except FileNotFoundError:
                    moved.append(inode)
            # What was renamed between listing and looking is found by its inode. Counting it as
            # nothing would let the pool grow beyond its limit.
            listed = self._listing() if moved else {}
            unknown = {inode: listed[inode] for inode in moved if inode in listed}
        return sum(sizes.values())

    def _listing(self) -> dict[int, str]:
        """Names by inode."""
        try:
            with os.scandir(self.directory) as entries:
                return {e.inode(): e.name for e in entries if e.name != MARK}
        except FileNotFoundError:
            return {}

    def available_bytes(self) -> int | None:
        """Bytes free on the file system; None where it has no limit."""
        status = os.statvfs(self.directory)
        # A tmpfs without a limit reports no blocks at all.
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def locked(self) -> FileLock:
        """Makes the directory, and lets one process of the run at a time count new bytes.

        Raises `TimeoutError` when another keeps the lock for half a minute.
        """
        path = self.directory / POOL_LOCK
        while True:
            self.make()
            try:
                return FileLock(path, _LOCK_SECONDS)
            except FileNotFoundError:
                continue  # the store was removed at this moment
            except BlockingIOError:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"{path} has been locked for {_LOCK_SECONDS:.0f} s: a process of this run "
                    "hangs; look for it in /proc/locks and end it",
                ) from None


def size_class(size: int) -> int:
    """The least class of at least `size` bytes: 16 KiB, 20, 24, 28, 32, 40, ... always whole pages.

    From 16 KiB on a class is at most a quarter larger than what was asked for. Raises `ValueError`
    for a negative size.
    """
    if size < 0:
        raise ValueError(f"a segment cannot have {size} bytes")
    if size <= SMALLEST:
        return SMALLEST
    octave = 1 << (size.bit_length() - 1)
    quarter = octave // 4
    return -(-size // quarter) * quarter


def is_whole_segment(status: os.stat_result) -> bool:
    """Whether this is a segment with all its pages; others are removed, not recycled.

    Segments carry the sticky bit, which the kernel ignores on files. One whose process was killed
    while pages were allocated has holes: writing to it could be SIGBUS.
    """
    return (
        is_own_file(status)
        and bool(status.st_mode & stat.S_ISVTX)
        and status.st_nlink == 1
        and status.st_blocks * 512 >= status.st_size > 0
    )


class _Identity:
    """This process's name, and generations that rise within it."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._process: str | None = None
        self._generation = 0

    def process(self) -> str:
        # Kept, because finding out the start time costs more than all of recycling a segment.
        if self._process is None:
            self._process = str(ProcessId.current())
        return self._process

    def next_generation(self) -> int:
        with self._lock:
            self._generation = max(self._generation + 1, time.time_ns())
            return self._generation


_identity = _Identity()
os.register_at_fork(after_in_child=_identity.after_fork_in_child)
