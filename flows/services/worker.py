"""The worker: a Prefect process worker that serves the pool of our deployments."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from earl_core.system.processes import child_path
from earl_core.system.service import Service
from flows.deployments import POOL
from flows.server_access import Access
from flows.services.process import spawn

_QUERY_SECONDS = 2
"""Seconds between two looks for flow runs that are due."""

_CANCEL_SECONDS = 3
"""Seconds between two looks for flow runs to cancel, where the server's events do not arrive."""

STOP_FLOWS_SECONDS = 40.0
_FLOW_RUN = b"PREFECT__FLOW_RUN_ID="


def start_worker(
    runs_directory: str, home: Path, access: Access, mark: str, server: str
) -> Service:
    """Start the worker; it asks the server of `access`.

    mark: of an earlier worker, whose flow runs go on; empty if there is none. server: the process
    with which the worker ends; empty for a server of somebody else.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": child_path(os.environ),
        "PREFECT_HOME": str(home),
        **access.environment(),
        "PREFECT_WORKER_QUERY_SECONDS": str(_QUERY_SECONDS),
        "PREFECT_WORKER_CANCELLATION_POLL_SECONDS": str(_CANCEL_SECONDS),
        "PREFECT_RUNNER_POLL_FREQUENCY": str(_CANCEL_SECONDS),
        # Where a command is silent, the worker's log is what people are told to look at.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    }
    command = ["-m", "flows.services.worker_process", server]
    command += ["worker", "start", "--pool", POOL, "--name", _name(), "--type", "process"]
    worker = Service("worker", f"{access.site}/api", mark=mark, secure=access.url)
    return spawn(runs_directory, worker, command, environment)


def _name() -> str:
    return f"earl-{socket.gethostname()}"


def reports(access: Access, worker: Service) -> bool:
    """Tell whether the server has heard of the worker since its start."""
    with suppress(OSError, ValueError, KeyError):
        for known in access.ask(f"work_pools/{POOL}/workers/filter", {"limit": 200}):
            heard = datetime.fromisoformat(known["last_heartbeat_time"].replace("Z", "+00:00"))
            if known["name"] == _name() and heard.timestamp() >= worker.since:
                return True
    return False


def stop_flow_runs(access: Access, worker: Service, say: Callable[[str], None]) -> None:
    """Cancel what the worker runs, as Prefect's pages do, and wait for its processes.

    Flow runs that do not end, or whose cancellation a server that does not answer was not told, are
    left to signals.
    """
    running = _flow_runs(worker)
    if running:
        say(f"cancelling {len(running)} of the worker's flow runs")
    for flow_run in running:
        with suppress(OSError, ValueError):
            state = {"type": "CANCELLING", "name": "Cancelling"}
            access.ask(f"flow_runs/{flow_run}/set_state", {"state": state})
    deadline = time.monotonic() + STOP_FLOWS_SECONDS
    while _flow_runs(worker) and time.monotonic() < deadline:
        time.sleep(0.2)


def _flow_runs(worker: Service) -> set[str]:
    """The ids of flow runs with a process of this worker."""
    found = set()
    for process in worker.processes():
        with suppress(OSError):
            for entry in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(_FLOW_RUN):
                    found.add(entry.removeprefix(_FLOW_RUN).decode())
    return found
