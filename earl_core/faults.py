"""Fault points: named places where a test can make this process die or its disk be full.

`EARL_FAULT=update.after_step@2=kill` kills the process that reaches the point `update.after_step`
in iteration 2. Actions: `kill` (SIGKILL to itself), `enospc` (raise OSError as a full disk does),
`raise` (RuntimeError). Unset, a point costs one dictionary look-up.
"""

from __future__ import annotations

import errno
import os
import signal


def point(name: str, iteration: int) -> None:
    """Do what EARL_FAULT asks for at this point."""
    wanted = os.environ.get("EARL_FAULT")
    if not wanted:
        return
    place, _, action = wanted.partition("=")
    if place != f"{name}@{iteration}":
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "enospc":
        raise OSError(errno.ENOSPC, "No space left on device (injected)")
    raise RuntimeError(f"injected failure at {place}")
