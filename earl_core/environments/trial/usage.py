"""Use of a host process: memory, threads, open files, child processes."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import psutil

_POLL_SECONDS = 0.05
_POLLS = 20


class Usage(NamedTuple):
    """memory: resident bytes of the host. The others are counts; processes: its descendants."""

    memory: float
    threads: float
    files: float
    processes: float

    def growth(self, before: Usage, episodes: int) -> Usage:
        """Return the growth since then, for each of so many episodes."""
        pairs = zip(self, before, strict=True)
        return Usage(*((now - then) / episodes for now, then in pairs))


def usage(pid: int) -> Usage:
    """Measure the host now."""
    host = psutil.Process(pid)
    return Usage(
        host.memory_info().rss,
        host.num_threads(),
        host.num_fds(),
        len(host.children(recursive=True)),
    )


async def settled_usage(pid: int) -> Usage:
    """Measure the host once the environments that were closed have let go, or after a second."""
    now = usage(pid)
    for _ in range(_POLLS):
        before = now
        await asyncio.sleep(_POLL_SECONDS)
        now = usage(pid)
        if now[1:] == before[1:]:
            break
    return now


def processor_seconds(pid: int) -> float:
    """Add up the processor seconds that the host and its descendants have used so far."""
    host = psutil.Process(pid)
    times = [host.cpu_times(), *(child.cpu_times() for child in host.children(recursive=True))]
    return sum(each.user + each.system for each in times)
