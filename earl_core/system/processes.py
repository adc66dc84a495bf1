"""Processes as Linux shows them in /proc: identity, family trees, kills, children's environment.

An identity names host, boot, process and start time, so that what a dead process left can be told
from what a living one uses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple


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
    """Return the time at which the process started, in clock ticks since boot; None when it is gone
    or a zombie."""
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
        """Return the id of this process."""
        return cls(boot_id(), os.getpid(), start_time(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Read the id from `str(process_id)`; None when it is not one."""
        parts = text.split("_")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]))

    def __str__(self) -> str:
        return f"{self.boot}_{self.pid}_{self.started}"

    def alive(self) -> bool:
        """Tell whether that very process still runs on this boot."""
        return self.boot == boot_id() and start_time(self.pid) == self.started


MARK = "EARL_WORKER_MARK"
"""Environment variable that marks a rank and, by inheritance, all that it starts."""

ENDING_GRACE_SECONDS = 8.0
"""Seconds from SIGTERM to SIGKILL; an engine needs up to 6 s to clear its shared memory."""

_KILL_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """A process; the start time tells it from a later one with the same pid.

    `living` is False for a zombie, which only waits to be reaped. A zombie that still has threads
    is a process in the middle of dying: it holds memory and its children are still its own.
    """

    pid: int
    start_ticks: int
    parent: int
    living: bool


def inspect(pid: int) -> Process | None:
    """Return the process, or None if it is gone or only a zombie."""
    process = _read(pid)
    return process if process is not None and process.living else None


def still(process: Process) -> Process | None:
    """The process as it is now; None once it has ended, whoever has its pid since."""
    now = inspect(process.pid)
    return now if now is not None and now.start_ticks == process.start_ticks else None


def _read(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name, in parentheses, may hold anything; the fields count from its end.
    fields = stat[stat.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    living = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
    return Process(pid, int(fields[19]), int(fields[1]), living)


def _all_processes() -> list[Process]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [process for pid in pids if (process := _read(pid)) is not None]


def descendants(pid: int) -> list[Process]:
    """Return the living children of a process, their children, and so on; parents come first."""
    by_parent: dict[int, list[Process]] = {}
    for process in _all_processes():
        by_parent.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    level = by_parent.get(pid, [])
    while level:
        found += level
        level = [child for process in level for child in by_parent.get(process.pid, [])]
    # Zombies are walked through, but not returned: one that dies may not have let go of its own.
    return [process for process in found if process.living]


def marked(mark: str, variable: str = MARK) -> list[Process]:
    """Return the processes whose environment carries `mark`, orphans included. One that rewrites
    its title (as vLLM's engine does) may have written over its environment."""
    wanted = f"{variable}={mark}".encode()
    found = []
    for process in filter(lambda process: process.living, _all_processes()):
        with suppress(OSError):
            if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def end_processes(
    find: Callable[[], Iterable[Process]],
    grace_seconds: float,
    reap: Callable[[], None] = lambda: None,
) -> bool:
    """End every process that `find` returns; True once there are none left.

    SIGTERM goes from the top down: a process gets it when its parent is gone, so that each can end
    its own children in its own way (an engine that loses its workers first cannot clean up after
    them). When three quarters of the grace are over everyone gets it, once, and at its end SIGKILL.
    `find` may return a process again and again; new ones it finds are treated alike. `reap` is
    called before each look, for a caller that must wait for its children.
    """
    begin = time.monotonic()
    signalled: set[tuple[int, int]] = set()
    pause = 0.005
    empty = False
    while True:
        reap()
        living = list(find())
        if not living:
            # A look at /proc takes a while, and a process can change parents in the middle of it.
            if empty:
                return True
            empty = True
            continue
        empty = False
        elapsed = time.monotonic() - begin
        if elapsed > grace_seconds + _KILL_SECONDS:
            return False
        if elapsed >= grace_seconds:
            for process in living:
                send_signal(process, signal.SIGKILL)
        else:
            pids = {process.pid for process in living}
            everyone = elapsed >= 0.75 * grace_seconds
            for process in living:
                key = (process.pid, process.start_ticks)
                if key not in signalled and (everyone or process.parent not in pids):
                    signalled.add(key)
                    send_signal(process, signal.SIGTERM)
                    # A stopped process acts on SIGTERM only after it is continued.
                    send_signal(process, signal.SIGCONT)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def send_signal(process: Process, number: signal.Signals) -> None:
    """Harmless when the process has ended, or is not ours to signal."""
    if still(process) is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, instead of children of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(number)}")


def prefer_as_oom_victim() -> None:
    """Ask the kernel to kill this process and its children before the controller."""
    path = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):
        if int(path.read_text()) < 300:
            path.write_text("300")


def child_path(environment: Mapping[str, str]) -> str:
    """The PYTHONPATH with which `python -P -m` finds this code first; the rest as it was.

    -P keeps the working directory from coming before everything.
    """
    root = str(Path(__file__).resolve().parents[2])
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([root, *(e for e in known if e not in ("", root))])
