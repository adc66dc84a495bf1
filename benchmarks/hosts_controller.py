"""`earl`, with the time that it spends in Ray's calls noted; run by `benchmarks.hosts`.

A call's time is that of whoever makes it, in whatever thread: `ray.get` and the sending of calls.
Not counted is the wait for a host's next bytes, in which nothing is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from flows.cli import main

NOTES = "EARL_RAY_CALLS"
"""Environment variable: the file of times and seconds, one line for each call."""


def _noting(call: Callable[..., Any], file: int) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            seconds = time.perf_counter() - begun
            os.write(file, f"{time.time()} {seconds}\n".encode())

    return noted


def watch_ray() -> None:
    """Have every call of this process noted."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    import ray
    from ray.actor import ActorMethod

    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.open(os.environ[NOTES], flags, 0o600)
    ray.get = _noting(ray.get, file)
    ActorMethod._remote = _noting(ActorMethod._remote, file)


if __name__ == "__main__":
    watch_ray()
    main()
