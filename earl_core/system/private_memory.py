"""Private memory of processes (neither file nor shared memory) at its peak, from Linux's /proc."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_FIELD = re.compile(r"^(VmHWM|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)


def peak_bytes(pids: Iterable[int]) -> int:
    """Their peaks since these were reset, added up; processes that are gone count nothing."""
    return sum(_peak_of(pid) for pid in pids)


def _peak_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    sizes = {name: int(size) * 1024 for name, size in _FIELD.findall(status)}
    shared = sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)
    return max(0, sizes.get("VmHWM", 0) - shared)
