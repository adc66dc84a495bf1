"""A cap on the memory of some processes, which the kernel enforces by killing; or on their time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools.memory_cap import remove_group

_numbers = itertools.count()


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A control group of version 1 whose processes together may hold this many bytes.

    A process enters, with the children that it starts from then on, when its pid is written to
    the directory's `cgroup.procs`. All of them must have ended when the context does. Skips the
    test where no such group can be made.
    """
    with _group("memory", {"memory.limit_in_bytes": limit_bytes}) as directory:
        yield directory


@contextmanager
def processor_cgroup(cores: float) -> Iterator[Path]:
    """Likewise one whose processes together get so many cores' time."""
    files = {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": round(100_000 * cores)}
    with _group("cpu", files) as directory:
        yield directory


@contextmanager
def _group(controller: str, files: dict[str, int]) -> Iterator[Path]:
    directory = _own(controller) / f"earl_test_{os.getpid()}_{next(_numbers)}"
    try:
        directory.mkdir()
        for name, value in files.items():
            (directory / name).write_text(str(value))
    except OSError:
        remove_group(directory)
        pytest.skip(f"needs a writable {controller} cgroup, version 1")
    try:
        yield directory
    finally:
        remove_group(directory)


def _own(controller: str) -> Path:
    """The cgroup of this process, below which a kill is told from those of others."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path("/sys/fs/cgroup", controller, path.lstrip("/"))
    pytest.skip(f"needs a {controller} cgroup, version 1")
