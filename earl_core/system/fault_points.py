"""Fault points: named places where a test can make this process die or its disk be full.

`EARL_FAULT=update.step0@2=kill` kills every process that reaches the point `update.step0` in
iteration 2, `update.step0@2:1=kill` only rank 1 of the group. Actions: `kill` (SIGKILL to itself),
`stop` (SIGSTOP to itself: no heartbeat), `hang` (sleep for ever, with heartbeats), `wait` (until
nothing is at the path that `EARL_FAULT_GATE` names, or in that directory by the place's name; then
go on), `enospc` (raise OSError as a full disk does), `memory` (raise what torch raises when it gets
no memory), `gorge` (take memory until the kernel ends it), `raise` (RuntimeError). Several faults
stand with `;` between them.
`EARL_FAULT_ONCE=DIRECTORY` makes each happen once only, among all processes: a file there says that
it has. Unset, a point costs one dictionary look-up.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


def point(name: str, iteration: int) -> None:
    """Do what EARL_FAULT asks for at this point."""
    wanted = os.environ.get("EARL_FAULT")
    if not wanted:
        return
    here = f"{name}@{iteration}"
    places = (here, f"{here}:{os.environ.get('RANK', '0')}")
    for fault in wanted.split(";"):
        place, _, action = fault.partition("=")
        if place in places and _first(place):
            _happen(place, action)


def _first(place: str) -> bool:
    """Tell whether the fault may happen (again)."""
    directory = os.environ.get("EARL_FAULT_ONCE")
    if not directory:
        return True
    with suppress(FileExistsError):
        (Path(directory) / place).touch(exist_ok=False)
        return True
    return False


def _happen(place: str, action: str) -> None:
    logger.warning("fault point %s: %s", place, action)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        # Another thread may take the signal, which this one would run on beside for a moment.
        time.sleep(0.1)
        return
    while action == "hang":
        time.sleep(60)
    if action == "wait":
        gate = Path(os.environ["EARL_FAULT_GATE"])
        gate = gate / place if gate.is_dir() else gate
        while gate.exists():
            time.sleep(0.05)
        return
    if action == "enospc":
        raise OSError(errno.ENOSPC, "No space left on device (injected)")
    if action == "gorge":
        taken = []
        while True:
            # Written to, for untouched pages cost nothing.
            taken.append(bytearray(b"1") * 2**24)
    if action == "memory":
        # The words of torch's allocator on the CPU, so that they are recognised as they are.
        raise RuntimeError(
            f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {2**40} bytes. "
            "Error code 12 (injected)"
        )
    raise RuntimeError(f"injected failure at {place}")
