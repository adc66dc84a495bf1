"""What all workers of one test session share: made by whoever needs it first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from earl_core.system.files import FileLock

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


@contextmanager
def in_memory(name: str) -> Iterator[Path]:
    """An empty folder that no disk delays. Prefect's server, which has one SQLite file, was seen to
    leave questions unanswered for 30 s while other tests wrote to the disk."""
    place = Path(f"/dev/shm/earl-tests-{name}-{os.getpid()}")
    place.mkdir(mode=0o700)
    yield place
    shutil.rmtree(place, ignore_errors=True)
