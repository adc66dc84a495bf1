"""Control groups of a sandbox, below this process's own, of version 1 or 2.

They are below, so that no limit around this process is left. Version 2 lets few have them there: a
group with processes of its own has none with limits below it, unless it is the machine's first.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from earl_core.system.control_groups import own_groups

_NAME = "earl-python-"
_numbers = itertools.count()


@contextmanager
def limited_groups(memory: int, processes: int) -> Iterator[list[str]]:
    """Directories of empty groups whose processes may use so many bytes together and be so many;
    none where they cannot be had. They go afterwards, once their processes have ended."""
    made: list[Path] = []
    try:
        whole = _make(made, memory, processes)
        yield [str(group) for group in made] if whole else []
    finally:
        for group in made:
            with suppress(OSError):
                group.rmdir()


def _make(made: list[Path], memory: int, processes: int) -> bool:
    limits = {
        "memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory,
        "memory.max": memory, "memory.swap.max": 0, "memory.oom.group": 1,
        "pids.max": processes,
    }  # fmt: skip
    parents = {
        group.directory
        for controller in ("memory", "pids")
        for group in own_groups(Path("/"), controller)
    }
    held = set()
    for parent in sorted(parents):
        group = parent / f"{_NAME}{os.getpid()}-{next(_numbers)}"
        try:
            group.mkdir()
            made.append(group)
            for name, limit in limits.items():
                if (group / name).exists():
                    (group / name).write_text(str(limit))
                    held.add(name.partition(".")[0])
        except OSError:
            return False
    for group in [each for each in made if not _limits(each)]:
        group.rmdir()
        made.remove(group)
    return held == {"memory", "pids"}


def _limits(group: Path) -> bool:
    names = ("memory.limit_in_bytes", "memory.max", "pids.max")
    return any((group / name).exists() for name in names)


def sweep() -> None:
    """Remove the empty groups of processes that are no more."""
    for controller in ("memory", "pids"):
        for own in own_groups(Path("/"), controller):
            for group in own.directory.glob(f"{_NAME}*"):
                pid = group.name.removeprefix(_NAME).partition("-")[0]
                if not Path("/proc", pid).exists():
                    with suppress(OSError):
                        group.rmdir()
