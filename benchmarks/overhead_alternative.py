"""The straightforward way to put an RL iteration into Prefect: synchronous flows, default tasks.

Run by `benchmarks.overhead` in a process of its own; prints the seconds of each iteration.
"""

from __future__ import annotations

import json
import sys
import time

from prefect import flow, task

from earl_core.deployment.stages import STAGES


@task
def stage(name: str, number: int, before: str | None) -> str:
    """An empty stage that depends on the one before it."""
    return f"{name} {number} after {before}"


@flow(log_prints=False)
def iteration(number: int) -> str:
    """Every stage but the optional one, one after another."""
    last: str | None = None
    for name, each in STAGES.items():
        if not each.optional:
            last = stage.submit(name, number, last).result()
    return last or ""


@flow(log_prints=False)
def train(iterations: int) -> list[float]:
    """The loop; seconds of each iteration."""
    seconds = []
    for number in range(iterations):
        started = time.perf_counter()
        iteration(number)
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    print(json.dumps(train(int(sys.argv[1]))))
