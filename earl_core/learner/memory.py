"""Peak memory of one update, for metrics and for the selector's calibration."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch


def reset_peak() -> None:
    """Start a new measurement: the peak falls to what is used now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # Without the right to reset it the peak stays that of the whole process: still an upper
        # bound, which is the safe side for a memory model.
        return


def peak_bytes() -> dict[str, float]:
    """`peak_rss_bytes` of this process since the reset, and `peak_cuda_bytes` with a GPU."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    resident = int(found.group(1)) * 1024 if found else psutil.Process().memory_info().rss
    peaks = {"peak_rss_bytes": float(resident)}
    if torch.cuda.is_available():
        peaks["peak_cuda_bytes"] = float(torch.cuda.max_memory_allocated())
    return peaks
