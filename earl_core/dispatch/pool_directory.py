"""The directory of a pool: what names mean, what lies there, and the lock for new bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from earl_core.dispatch.size_classes import is_size_class
from earl_core.process import ProcessId

FREE = ".free."
WRITING = ".writing."
SEGMENT_MODE = 0o1600
_LOCK = ".pool.lock"
_LOCK_SECONDS = 30.0  # the lock is held for microseconds; only a stopped process keeps it


class PoolDirectory:
    """Names and sizes of a pool's files. A segment's state is its name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def free_path(self, status: os.stat_result) -> Path:
        """The name of this segment while it is free: it follows from the inode."""
        return self.path / f"{FREE}{status.st_size}.{status.st_ino}"

    def new_writing_path(self) -> tuple[Path, int]:
        """A name in state writing of this process, and the generation in it."""
        generation = _identity.next_generation()
        return self.path / f"{WRITING}{_identity.process()}.{generation}", generation

    def names(self, prefix: str = "") -> list[str]:
        """Names of the files, hidden ones included; empty without a directory."""
        try:
            return [name for name in os.listdir(self.path) if name.startswith(prefix)]
        except FileNotFoundError:
            return []

    def free(self) -> list[tuple[int, str]]:
        """Size and name of the free segments, ascending."""
        found = []
        for name in self.names(FREE):
            size, _, inode = name.removeprefix(FREE).partition(".")
            if size.isdigit() and inode.isdigit():
                found.append((int(size), name))
        return sorted(found)

    def dead_writing(self) -> list[Path]:
        """Files in state writing whose process is gone."""
        dead = []
        for name in self.names(WRITING):
            owner = ProcessId.parse(name.removeprefix(WRITING).rpartition(".")[0])
            if owner is None or not owner.alive():
                dead.append(self.path / name)
        return dead

    def used_bytes(self) -> int:
        """Bytes of all files that lie here at one moment, while others rename them."""
        sizes: dict[int, int] = {}
        unknown = self._listing()
        while unknown:
            moved = []
            for inode, name in unknown.items():
                try:
                    sizes[inode] = os.lstat(self.path / name).st_size
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
            with os.scandir(self.path) as entries:
                return {entry.inode(): entry.name for entry in entries}
        except FileNotFoundError:
            return {}

    def available_bytes(self) -> int | None:
        """Bytes free on the file system; None where it has no limit."""
        status = os.statvfs(self.path)
        # A tmpfs without a limit reports no blocks at all.
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory, and lets one process of the run at a time count new bytes.

        Raises `TimeoutError` when another keeps the lock for half a minute.
        """
        descriptor = self._lock()
        try:
            yield
        finally:
            # Said, not left to closing: a child forked meanwhile has the descriptor too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _lock(self) -> int:
        path = self.path / _LOCK
        patience = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BlockingIOError:
                if time.monotonic() > patience:
                    os.close(descriptor)
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"{path} has been locked for {_LOCK_SECONDS:.0f} s: a process of this run "
                        "hangs; look for it in /proc/locks and end it",
                    ) from None
                time.sleep(0.001)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def is_whole_segment(status: os.stat_result) -> bool:
    """Whether this is a segment with all its pages; others are removed, not recycled.

    Segments carry the sticky bit, which the kernel ignores on files. One whose process was killed
    while pages were allocated has holes: writing to it could be SIGBUS.
    """
    return (
        stat.S_ISREG(status.st_mode)
        and bool(status.st_mode & stat.S_ISVTX)
        and status.st_nlink == 1
        and is_size_class(status.st_size)
        and status.st_blocks * 512 >= status.st_size
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
