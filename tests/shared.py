"""What all workers of one test session share: made by whoever needs it first."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from earl_core.system.files import FileLock
from earl_core.system.processes import ProcessId, boot_id, start_time

if TYPE_CHECKING:
    import pytest

_SECONDS = 600.0
"""Another worker may be making it."""


def session_process() -> int:
    """The process that lives as long as the session: of several workers, the one above them."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """An empty directory that `make` has filled, for this session and any worker."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    place = root / "shared" / name
    done = place.with_name(f"{name}.done")
    place.parent.mkdir(exist_ok=True)
    with FileLock(place.with_name(f"{name}.lock"), _SECONDS):
        if not done.exists():
            # Of an attempt that failed.
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            done.touch()
    return place


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on. The kernel gives it to no socket that asks for
    any port, as it does with those from 32768 on: so it stays free until a server takes it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


MEMORY = Path("/dev/shm")
_MARKED = re.compile(r"earl-tests-([0-9a-z]+_\d+_\d+)-")


def memory_place(name: str, owner: int | None = None) -> Path:
    """A place in shared memory that is marked as ours, and by the process for which it is there;
    the next session of tests removes it once that has ended. owner: None: this process."""
    pid = os.getpid() if owner is None else owner
    process = ProcessId(boot_id(), pid, start_time(pid) or 0)
    return MEMORY / f"earl-tests-{process}-{name}"


def sweep_memory(memory: Path = MEMORY) -> None:
    """Remove the places whose process was killed, and so has left them."""
    for place in memory.glob("earl-tests-*"):
        marked = _MARKED.match(place.name)
        owner = ProcessId.parse(marked[1]) if marked else None
        if owner is not None and not owner.alive():
            # What belongs to somebody else stays.
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def in_memory(name: str) -> Iterator[Path]:
    """An empty folder that no disk delays. Prefect's server, which has one SQLite file, was seen to
    leave questions unanswered for 30 s while other tests wrote to the disk."""
    place = memory_place(name)
    place.mkdir(mode=0o700)
    yield place
    shutil.rmtree(place, ignore_errors=True)
