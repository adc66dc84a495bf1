"""Processes of services: started to outlive this one, waited for, ended."""

from __future__ import annotations

import http.client
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from earl_core.system.errors import EarlError
from earl_core.system.processes import ProcessId, boot_id, end_processes, start_time
from earl_core.system.service import MARK, Service, services_directory
from flows.server import tail
from flows.server_access import opener

_PAUSE_SECONDS = 0.1
_ANSWER_SECONDS = 1.0
END_SECONDS = 20.0
"""Seconds from SIGTERM to SIGKILL: a flow's ranks and hosts need most of them to end."""


class ServiceFailed(EarlError):
    """A service ended, or does not answer; the message has the end of its log."""


def spawn(
    runs_directory: str,
    service: Service,
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
) -> Service:
    """Start a service in a session of its own; returns it with its process.

    service: with a mark, it has that one again, so that what an earlier process of it has left
    belongs to it. command: of this interpreter. descriptors: of sockets that it inherits.
    """
    state = services_directory(runs_directory)
    mark = service.mark or secrets.token_hex(8)
    log = os.open(log_of(runs_directory, service.name), _LOG_FLAGS, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=descriptors,
            env={**environment, MARK: mark},
            umask=0o077,
            # Prefect looks for settings in the working directory.
            cwd=state,
            start_new_session=True,
        )
    finally:
        os.close(log)
    identity = ProcessId(boot_id(), process.pid, start_time(process.pid) or 0)
    return replace(service, process=str(identity), mark=mark, since=time.time())


_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


def log_of(runs_directory: str, name: str) -> Path:
    """The log of the service of this name."""
    return services_directory(runs_directory) / f"{name}.log"


def until(
    answers: Callable[[], bool], service: Service, runs_directory: str, seconds: float
) -> None:
    """Wait until a service answers. Raises `ServiceFailed`."""
    deadline = time.monotonic() + seconds
    while not answers():
        ended = not service.alive
        if ended or time.monotonic() > deadline:
            how = "ended" if ended else f"did not answer within {seconds:.0f} s"
            log = log_of(runs_directory, service.name)
            raise ServiceFailed(
                f"{TITLES[service.name]} {how}: look at its log {log}, and end the rest with "
                f"`earl down`.\n{tail(log)}"
            )
        time.sleep(_PAUSE_SECONDS)


TITLES = {"prefect": "Prefect's server", "mlflow": "MLflow's server", "worker": "Prefect's worker"}


def end(service: Service) -> None:
    """End a service with all that it started; nothing else. Raises `ServiceFailed`."""
    if not end_processes(service.processes, END_SECONDS):
        pids = ", ".join(str(process.pid) for process in service.processes())
        raise ServiceFailed(f"{TITLES[service.name]} does not end: look at process {pids}")


def mlflow_answers(service: Service) -> bool:
    """Tell whether the MLflow server of `earl up` answers: that one and no other."""
    try:
        with opener(service.certificate).open(
            f"{service.secure}/health", timeout=_ANSWER_SECONDS
        ) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False
