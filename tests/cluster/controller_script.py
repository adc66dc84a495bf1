"""A controller to be killed: starts a group with grandchildren, prints their pids, and waits."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from earl_core.cluster.worker_group import WorkerGroup


def main(log_directory: str, mode: str) -> None:
    group = WorkerGroup("w", "tests.cluster.targets:Target", log_directory=Path(log_directory))
    group.start({}, {}, world_size=2)
    pids = list(group.pids)
    for kind in ("child", "orphan", "fork"):
        pids += group.call("spawn", stage="rollout", iteration=0, deadline_seconds=120, kind=kind)
    monitor = group._monitor
    assert monitor is not None
    if mode == "fork" and os.fork() == 0:
        # A forked child of the controller lives on; it must not keep the workers alive.
        time.sleep(600)
    processes: list[Any] = [rank.process for rank in monitor.ranks]
    supervisors = [process.supervisor.pid for process in processes]
    print(json.dumps({"pids": pids, "supervisors": supervisors}), flush=True)
    if mode == "call":
        group.call("sleep", stage="rollout", iteration=0, deadline_seconds=600, seconds=600)
    elif mode in ("wait", "fork"):
        time.sleep(600)
    elif mode == "raise":
        raise RuntimeError("the flow failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
