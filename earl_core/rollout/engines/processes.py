"""Processes that an engine started: who they are, what they use, what they leave behind, and
whether they failed for lack of memory.

They tell their parent no more than that they ended. Why stands in what they wrote to the log that
they share with it, and in the kernel's count of those it killed for memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

import psutil

from earl_core.cluster.errors import last_error
from earl_core.rollout.engines.engine import OUT_OF_MEMORY_ADVICE
from earl_core.system.memory import (
    OutOfMemory,
    bytes_asked,
    out_of_memory_counters,
    out_of_memory_kills_since,
    refused,
)

_SHARED_MEMORY = "/dev/shm/"

_GRACE_SECONDS = 6.0


class LeftoverProcesses:
    """Processes and shared memory that have to be gone after an engine stopped, however its
    processes ended.

    A process that is killed cannot remove its shared memory; its names are known from before.
    """

    def __init__(self) -> None:
        self._processes: list[psutil.Process] = []
        self._shared: set[Path] = set()

    def record(self, pids: Sequence[int]) -> None:
        """Note these processes and the shared memory they have open now."""
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(pid))
                self._shared |= _open_shared_memory(pid)

    def clear_away(self) -> None:
        """End processes that are left and unlink their shared memory."""
        _, alive = psutil.wait_procs(self._processes, timeout=_GRACE_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=_GRACE_SECONDS)
        for path in self._shared:
            path.unlink(missing_ok=True)
        self._processes.clear()
        self._shared.clear()


def _open_shared_memory(pid: int) -> set[Path]:
    """Files that libraries create in shared memory (`psm_*`, `sem.*`, `vllm*`), by open files and
    mappings. The weights that EARL itself publishes are not among them."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found.add(line.split(maxsplit=5)[-1])
    prefixes = tuple(_SHARED_MEMORY + name for name in ("psm_", "sem.", "vllm", "torch_"))
    return {Path(name) for name in found if name.startswith(prefixes) and " (deleted)" not in name}


_STDERR = 2
_READ_BYTES = 2**18

# What vLLM says when keys and values of one sequence, or of none, fit beside the weights.
_NO_CACHE = re.compile(r"No available memory for the cache blocks")
_SMALL_CACHE = re.compile(
    r"\(([\d.]+) GiB KV\s+cache is needed, which is larger than the available"
)
# What it says before it loads anything, when others left less than the share it is to take.
_LITTLE_LEFT = re.compile(
    r"Free memory on device.*is less than desired GPU memory utilization \([\d.]+, ([\d.]+) GiB"
)
_LEAVE_MORE = "lower rollout.vllm.gpu_memory_utilization, or end what else uses the device"
_KILLED = re.compile(r"proc\(s\): \{[^}]*: -9\b|EngineDead|[Ee]ngine process died")


class MemoryWatch:
    """Remembers where the log stood and how many processes the kernel had killed."""

    def __init__(self) -> None:
        self._begin = self._log_size()
        self._kills = out_of_memory_counters()

    def problem(self, error: BaseException, doing: str) -> OutOfMemory | None:
        """The error as an `OutOfMemory`; None when it has another cause. doing: a noun."""
        said = f"{type(error).__name__}: {error}\n{self._logged()}"
        little = _LITTLE_LEFT.search(said)
        lacking = little or _SMALL_CACHE.search(said)
        asked = None
        if lacking is not None:
            asked = int(float(lacking.group(1)) * 2**30)
        elif refused(said):
            asked = bytes_asked(said)
        elif not _NO_CACHE.search(said) and not self._killed(said):
            return None
        return OutOfMemory("rollout", doing, asked, _LEAVE_MORE if little else OUT_OF_MEMORY_ADVICE)

    def _killed(self, said: str) -> bool:
        """The count may hold kills of others, so a process of the engine must be missing too."""
        return bool(_KILLED.search(said)) and out_of_memory_kills_since(self._kills) > 0

    def _logged(self) -> str:
        if self._begin is None:
            return ""
        try:
            with Path(f"/proc/self/fd/{_STDERR}").open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._begin, end - _READ_BYTES))
                return log.read(_READ_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def with_cause(self, what: str) -> str:
        """Add to the failure the last error in the log since the start."""
        said = last_error(self._logged())
        return f"{what}; its log's last error: {said}" if said else what

    @staticmethod
    def _log_size() -> int | None:
        """Bytes in the log so far; None where standard error is no file, but a terminal, say."""
        try:
            status = os.fstat(_STDERR)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None
