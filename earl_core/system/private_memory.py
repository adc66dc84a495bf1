"""Memory of processes at its peak, from Linux's /proc."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_FIELD = re.compile(r"^(VmHWM|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)


def peak_bytes(pids: Iterable[int]) -> int:
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
    which is an upper bound."""
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _sizes(pid: int) -> dict[str, int]:
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return {name: int(size) * 1024 for name, size in _FIELD.findall(status)}
    return {}
