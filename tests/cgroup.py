"""A cap on the memory of some processes, which the kernel enforces by killing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.no_limit_cap import remove_group

_ROOT = Path("/sys/fs/cgroup/memory")
_numbers = itertools.count()


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A control group of version 1 whose processes together may hold this many bytes.

    A process enters, with the children that it starts from then on, when its pid is written to
    the directory's `cgroup.procs`. All of them must have ended when the context does. Skips the
    test where no such group can be made.
    """
    directory = _ROOT / f"earl_test_{os.getpid()}_{next(_numbers)}"
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
