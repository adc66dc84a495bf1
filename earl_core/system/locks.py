"""Locks that go with their holder, and that a look at them never takes.

They are open file description locks (`F_OFD_SETLK`): one belongs to an open file, so that threads
exclude each other too, and it is gone when the last descriptor is closed, also by SIGKILL. Asking
who holds one (`F_OFD_GETLK`) takes nothing, so that an onlooker never stands in the way, and it is
answered by the kernel for the inode: processes of other containers and mount namespaces count.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from pathlib import Path
from typing import Self

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid; struct flock of 64-bit Linux
_PAUSE = 0.001  # seconds between tries
_WHOLE = 0  # a length: to the end of the file, however far it grows


def lock_bytes(descriptor: int, start: int = 0, length: int = _WHOLE) -> bool:
    """Lock bytes for this open file; False when another open file has them."""
    return _change(descriptor, fcntl.F_WRLCK, start, length)


def unlock_bytes(descriptor: int, start: int = 0, length: int = _WHOLE) -> None:
    """Give bytes back that this open file has locked."""
    _change(descriptor, fcntl.F_UNLCK, start, length)


def _change(descriptor: int, kind: int, start: int, length: int) -> bool:
    try:
        request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_held(path: Path) -> bool:
    """Whether somebody has `path` locked. Takes nothing.

    What cannot be looked at counts as held: who asks wants to know whether it may be removed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, _WHOLE, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(descriptor)


class FileLock:
    """A locked file, made if it was not there, until `release`; a context manager too.

    Raises `BlockingIOError` when another has it for longer than `wait_seconds`, and `OSError` when
    `path` is a link, a folder or anything but a plain file.
    """

    def __init__(self, path: Path, wait_seconds: float = 0.0) -> None:
        self.path = path
        deadline = time.monotonic() + wait_seconds
        while (descriptor := self._try()) < 0:
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EWOULDBLOCK, f"{path} is locked by another process")
            time.sleep(_PAUSE)
        self._descriptor = descriptor

    def _try(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, f"{self.path} is not a plain file: remove it")
            # Whoever had it may have removed the name meanwhile: then this is nobody's lock.
            if lock_bytes(descriptor) and os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return -1

    def read(self) -> str:
        """What the holder wrote."""
        return os.pread(self._descriptor, 64, 0).decode(errors="replace").strip()

    def write(self, text: str) -> None:
        """Replace what the file says, for people to read."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Give the lock back; harmless when it was given back already."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Said, not left to closing: a child forked meanwhile has the descriptor too.
            unlock_bytes(descriptor)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
