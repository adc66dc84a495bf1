"""Which host and process made something, so that what dead processes left can be told apart."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from earl_core.system.process_tree import inspect


@cache
def boot_id() -> str:
    """The kernel's id of this boot; pids mean nothing across boots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
    except OSError:
        return "unknown"


def host_name() -> str:
    """The host as manifests and plans name it: `EARL_HOST` where it is set (containers often share
    one host name), else the host's name."""
    return os.environ.get("EARL_HOST") or socket.gethostname()


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when it is gone or a zombie."""
    process = inspect(pid)
    return process.start_ticks if process else None


@dataclass(frozen=True)
class ProcessId:
    """Boot id, pid and start time: unique over the life of a machine."""

    boot: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> ProcessId:
        """This process."""
        return cls(boot_id(), os.getpid(), start_time(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """From `str(process_id)`; None when it is not one."""
        parts = text.split("_")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]))

    def __str__(self) -> str:
        return f"{self.boot}_{self.pid}_{self.started}"

    def alive(self) -> bool:
        """Whether that very process still runs on this boot."""
        return self.boot == boot_id() and start_time(self.pid) == self.started
