"""Fault points: named places where a test can make this process die or its disk be full.

`EARL_FAULT=update.step0@2=kill` kills every process that reaches the point `update.step0` in
iteration 2, `update.step0@2:1=kill` only rank 1 of the group. Actions: `kill` (SIGKILL to itself),
`stop` (SIGSTOP to itself: no heartbeat), `hang` (sleep for ever, with heartbeats), `enospc` (raise
OSError as a full disk does), `memory` (raise what torch raises when it gets no memory), `raise`
(RuntimeError). Unset, a point costs one dictionary look-up.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time

logger = logging.getLogger(__name__)


def point(name: str, iteration: int) -> None:
    """Do what EARL_FAULT asks for at this point."""
    wanted = os.environ.get("EARL_FAULT")
    if not wanted:
        return
    place, _, action = wanted.partition("=")
    here = f"{name}@{iteration}"
    if place not in (here, f"{here}:{os.environ.get('RANK', '0')}"):
        return
    logger.warning("fault point %s: %s", place, action)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    while action == "hang":
        time.sleep(60)
    if action == "enospc":
        raise OSError(errno.ENOSPC, "No space left on device (injected)")
    if action == "memory":
        # The words of torch's allocator on the CPU, so that they are recognised as they are.
        raise RuntimeError(
            f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {2**40} bytes. "
            "Error code 12 (injected)"
        )
    raise RuntimeError(f"injected failure at {place}")
