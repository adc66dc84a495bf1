"""A process and all that it began, seen from outside: who, how much memory, and their end."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterable

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants() -> list[int]:
    """List the descendants of this process; those that ended and were not waited for too."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            stat = _read(f"/proc/{entry}/stat").rpartition(b") ")[2].split()
            if len(stat) > 1:
                children[int(stat[1])].append(int(entry))
    found = list(children[os.getpid()])
    for each in found:
        found += children[each]
    return found


def memory_of(processes: list[int], limit: int) -> int:
    """Bytes of all of them together. Pages that several share are told apart, which takes longer,
    only where they could make the difference to the limit."""
    held = (_read(f"/proc/{each}/statm").split() for each in processes)
    resident = sum(int(fields[1]) for fields in held if len(fields) > 1) * _PAGE
    if resident <= limit:
        return resident
    shares = (_share(_read(f"/proc/{each}/smaps_rollup")) for each in processes)
    known = [share for share in shares if share is not None]
    return sum(known) if known else resident


def end_all() -> None:
    """Kill until none is left. They are stopped first, so that none begins others meanwhile."""
    stopped: set[int] = set()
    while new := set(descendants()) - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new
    while True:
        _signal(descendants(), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for each in processes:
        try:
            os.kill(each, number)
        except (ProcessLookupError, PermissionError):
            pass


def _share(rollup: bytes) -> int | None:
    for line in rollup.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:  # it ended meanwhile
        return b""
