"""Processes that an engine started: who they are, what they use, what they leave behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

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
