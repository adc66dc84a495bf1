"""A cap on the memory of some processes, which the kernel enforces by killing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.no_limit_cap import remove_group

_numbers = itertools.count()


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A control group of version 1 whose processes together may hold this many bytes.

    A process enters, with the children that it starts from then on, when its pid is written to
    the directory's `cgroup.procs`. All of them must have ended when the context does. Skips the
    test where no such group can be made.
    """
    directory = _own() / f"earl_test_{os.getpid()}_{next(_numbers)}"
    try:
        directory.mkdir()
        (directory / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        remove_group(directory)
        pytest.skip("needs a writable memory cgroup, version 1")
    try:
        yield directory
    finally:
        remove_group(directory)


def _own() -> Path:
    """The memory cgroup of this process, below which a kill is told from those of others."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory", path.lstrip("/"))
    pytest.skip("needs a memory cgroup, version 1")
