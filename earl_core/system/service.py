"""Processes that outlive a command and serve the runs of a directory: who they are, where they
listen, which password they want.

All of it stands in one file, `<runs_directory>/services/services.json`, which only its user can
read. A password is kept when its server ends, so that whoever knows it (a browser, a run that goes
on) is let in again after the next start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from earl_core.system.files import open_file, write_atomic
from earl_core.system.processes import Process, ProcessId, descendants, inspect, marked

MARK = "EARL_SERVICE_MARK"
"""Environment variable that marks a service and, by inheritance, all that it starts."""

_FILE = "services.json"


@dataclass(frozen=True)
class Service:
    """One service. process: a `ProcessId` as text; empty when none was started, or it was ended.

    url: where a server answers, or the server that a worker asks. mark: the value of `MARK` in its
    processes. since: Unix time of its start, in seconds.
    """

    name: str
    url: str = ""
    user: str = ""
    password: str = ""
    process: str = ""
    mark: str = ""
    since: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether the process that was started still runs."""
        process = ProcessId.parse(self.process)
        return process is not None and process.alive()

    @property
    def address(self) -> str:
        """The URL with user and password, for clients that take them there."""
        parts = urlsplit(self.url)
        login = f"{self.user}:{self.password}@" if self.password else ""
        return urlunsplit(parts._replace(netloc=login + parts.netloc))

    def ended(self) -> Service:
        """The same without a process."""
        return replace(self, process="", mark="", since=0.0)

    def processes(self) -> list[Process]:
        """All that is left of what was started: the process, what it started, and orphans of it.

        A process that has the pid by now without being the one that was started is none of them.
        """
        found: dict[int, Process] = {}
        known = ProcessId.parse(self.process)
        if known is not None and known.alive():
            itself = inspect(known.pid)
            family = [*([itself] if itself else []), *descendants(known.pid)]
            found = {process.pid: process for process in family}
        if self.mark:
            found |= {process.pid: process for process in marked(self.mark, MARK)}
        found.pop(os.getpid(), None)
        return list(found.values())


def services_directory(runs_directory: str | Path) -> Path:
    """Where the state and the logs of the services of a runs directory lie."""
    return Path(runs_directory).resolve() / "services"


def read_services(runs_directory: str | Path) -> dict[str, Service]:
    """By name; empty where no file is, or one that this user has not written."""
    try:
        with open_file(services_directory(runs_directory) / _FILE) as stream:
            about = os.fstat(stream.fileno())
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                return {}
            known = json.loads(stream.read())
        return {entry["name"]: _service(entry) for entry in known}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _service(entry: Mapping[str, object]) -> Service:
    names = {field.name for field in fields(Service)}
    return Service(**{k: v for k, v in entry.items() if k in names})  # type: ignore[arg-type]


def living_service(runs_directory: str | Path, name: str) -> Service | None:
    """The service of this name if it runs."""
    found = read_services(runs_directory).get(name)
    return found if found is not None and found.alive else None


def write_services(runs_directory: str | Path, services: Iterable[Service]) -> None:
    """Replace the file."""
    text = json.dumps([asdict(service) for service in services], indent=2)
    write_atomic(services_directory(runs_directory) / _FILE, text.encode())
