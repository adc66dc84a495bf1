"""The lock of a run directory: held while a controller lives, gone with it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class RunInUse(RuntimeError):
    """Another live process works in this run directory."""


class RunLock:
    """An exclusive lock on `<run>/lock`; the file holds the owner's pid for people to read."""

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / "lock"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.read(self._descriptor, 32).decode().strip() or "unknown"
            os.close(self._descriptor)
            raise RunInUse(
                f"the run directory {run_directory} is in use by process {pid}: wait for it, stop "
                "it, or choose another name with --name"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back; harmless when it was given back already."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def is_locked(run_directory: Path) -> bool:
    """Whether a live process holds the run's lock."""
    try:
        descriptor = os.open(run_directory / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
