"""The lock of a run directory: held while a controller lives, gone with it."""

from __future__ import annotations

import os
from pathlib import Path

from earl_core.config import ConfigError
from earl_core.system.errors import InUse
from earl_core.system.files import FileLock, is_held
from earl_core.system.processes import start_time


class RunLock(FileLock):
    """An exclusive lock on `<run>/lock`; the file holds the owner's pid for people to read. Raises
    `InUse` when another process has it, `ConfigError` when it is no plain file."""

    def __init__(self, run_directory: Path) -> None:
        path = run_directory / "lock"
        try:
            super().__init__(path)
        except BlockingIOError:
            raise in_use(run_directory) from None
        except OSError as error:
            raise ConfigError(f"the run cannot be locked: {error.strerror}: {path}") from error
        self.write(f"{os.getpid()}\n")


def is_locked(run_directory: Path) -> bool:
    """Tell whether a live process holds the run's lock. Takes nothing."""
    return is_held(run_directory / "lock")


def in_use(run_directory: Path) -> InUse:
    """The error that says who holds the run's lock."""
    owner = _owner(run_directory / "lock")
    return InUse(
        f"the run directory {run_directory} is in use by {owner}: wait for it, stop it, or choose "
        "another name with --name",
        holder=owner,
    )


def _owner(path: Path) -> str:
    try:
        pid = int(path.read_text())
    except (OSError, ValueError):
        return "another process"
    # Its owner writes the pid a moment after it has the lock; in a container it has another.
    return f"process {pid}" if start_time(pid) is not None else "a process of another container"
