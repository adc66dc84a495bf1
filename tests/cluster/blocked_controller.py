"""A controller to be killed: its four ranks block in a collective, which it says, with all pids."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from earl_core.cluster.worker_group import WorkerGroup


def main(log_directory: str) -> None:
    group = WorkerGroup(
        "update", "tests.cluster.collective_target:Collective", log_directory=Path(log_directory)
    )
    group.start({}, {}, world_size=4)
    monitor = group._monitor
    assert monitor is not None
    processes: list[Any] = [rank.process for rank in monitor.ranks]
    supervisors = [process.supervisor.pid for process in processes]
    blocked: set[int] = set()

    def count(progress: dict[str, Any]) -> None:
        blocked.add(progress["rank"])
        if len(blocked) == 4:
            told = {"pids": list(group.pids), "supervisors": supervisors}
            print(json.dumps(told), flush=True)

    group.call("block", stage="update", iteration=3, deadline_seconds=600, on_progress=count)


if __name__ == "__main__":
    main(*sys.argv[1:])
