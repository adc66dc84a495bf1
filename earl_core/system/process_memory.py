"""Memory of processes: now and at its peak, and free memory given back to the host.

Read from /proc: psutil has no peaks, and its import would be a third of a rank's start.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FIELD = re.compile(r"^(VmHWM|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)


def resident_bytes(pid: int) -> tuple[int, int]:
    """A process's resident bytes: all, and the private part; (0, 0) if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0, 0
    resident, shared = int(fields[1]), int(fields[2])
    return resident * _PAGE_BYTES, (resident - shared) * _PAGE_BYTES


def tree_private_bytes(pid: int) -> int:
    """The private resident bytes of a process and its living descendants.

    Walks `/proc/<pid>/task/*/children`, which costs microseconds where a look at every process of
    the host costs milliseconds.
    """
    total = resident_bytes(pid)[1]
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    total += tree_private_bytes(int(child))
    return total


def private_peak_bytes(pids: Iterable[int]) -> int:
    """Peaks of their private memory (neither file nor shared memory) since these were reset, added
    up; processes that are gone count nothing."""
    found = map(_sizes, pids)
    shared = ("RssFile", "RssShmem")
    return sum(max(0, each.get("VmHWM", 0) - sum(map(each.get, shared, (0, 0)))) for each in found)


def resident_peak_bytes(pids: Iterable[int]) -> int:
    """Likewise of all their resident memory."""
    return sum(_sizes(pid).get("VmHWM", 0) for pid in pids)


def reset_peaks(pids: Iterable[int]) -> None:
    """Start a new measurement of both; without the right to, a peak stays that of the whole life,
    an upper bound, which is the safe side for a memory model."""
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _sizes(pid: int) -> dict[str, int]:
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return {name: int(size) * 1024 for name, size in _FIELD.findall(status)}
    return {}


def give_back_free_memory() -> None:
    """Return what the C library's allocator holds but nobody uses.

    It keeps freed blocks below 32 MiB for later, gigabytes after a large microbatch, which on a CPU
    other stages cannot have meanwhile. Taking them again costs about a second for 2 GiB.
    """
    # Only glibc has it.
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
