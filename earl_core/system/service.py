"""Processes that outlive a command and serve the runs of a directory: who they are, where they
listen, which password they want.

All of it stands in one file, `<runs_directory>/services/services.json`, which only its user can
read. Passwords and certificates are made anew at each start: whoever listened at the address of a
dead server may have been told the old ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from earl_core.system.files import make_directory, open_file, write_atomic
from earl_core.system.processes import Process, ProcessId, descendants, inspect, marked

MARK = "EARL_SERVICE_MARK"
"""Environment variable that marks a service and, by inheritance, all that it starts."""

_FILE = "services.json"


@dataclass(frozen=True)
class Service:
    """One service. process: a `ProcessId` as text; empty when none was started, or it was ended.

    url: where a server answers browsers, or the server that a worker asks does. secure: where it
    answers programs, showing the certificate in the file `certificate`. mark: the value of `MARK`
    in its processes. since: Unix time of its start, in seconds.
    """

    name: str
    url: str = ""
    user: str = ""
    password: str = ""
    process: str = ""
    mark: str = ""
    since: float = 0.0
    secure: str = ""
    certificate: str = ""

    @property
    def alive(self) -> bool:
        """True while the process that was started still runs."""
        process = ProcessId.parse(self.process)
        return process is not None and process.alive()

    @property
    def address(self) -> str:
        """The URL for programs with user and password, for clients that take them there."""
        parts = urlsplit(self.secure)
        login = f"{self.user}:{self.password}@" if self.password else ""
        return urlunsplit(parts._replace(netloc=login + parts.netloc))

    def ended(self) -> Service:
        """The same without a process."""
        return replace(self, process="", mark="", since=0.0)

    def processes(self) -> list[Process]:
        """All that is left of what was started: the process, what it started, and orphans of it. A
        process that has the pid by now without being the one that was started is none of them."""
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
    """Return the folder of the state and the logs of the services of a runs directory."""
    return Path(runs_directory).resolve() / "services"


def read_services(runs_directory: str | Path) -> dict[str, Service]:
    """Read the services by name; empty where no file is, or one that this user has not written."""
    try:
        with open_file(services_directory(runs_directory) / _FILE) as stream:
            if not _is_private(stream.fileno()):
                return {}
            known = json.loads(stream.read())
        return {entry["name"]: _service(entry) for entry in known}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _service(entry: Mapping[str, object]) -> Service:
    names = {field.name for field in fields(Service)}
    return Service(**{k: v for k, v in entry.items() if k in names})  # type: ignore[arg-type]


def known_services(runs_directory: str | Path, name: str) -> list[Service]:
    """The services of this name of all this user's runs directories: those that live before those
    that have ended, of these runs before others, started last before earlier."""
    places = [Path(runs_directory).resolve(), *noted_directories()]
    found = [(number, read_services(place).get(name)) for number, place in enumerate(places)]
    known = [(not it.alive, number > 0, -it.since, it) for number, it in found if it is not None]
    return [each[-1] for each in sorted(known, key=lambda each: each[:-1])]


def living_service(runs_directory: str | Path, name: str) -> Service | None:
    """The service of this name if one runs, for this runs directory or another of this user's."""
    known = known_services(runs_directory, name)
    return known[0] if known and known[0].alive else None


def write_services(runs_directory: str | Path, services: Iterable[Service]) -> None:
    """Replace the file; from now on they are found from every directory."""
    services = list(services)
    text = json.dumps([asdict(service) for service in services], indent=2)
    write_atomic(services_directory(runs_directory) / _FILE, text.encode())
    _note(Path(runs_directory).resolve(), any(service.process for service in services))


# Notes in the state home name the runs directories that have services.


def _notes() -> Path:
    home = os.environ.get("XDG_STATE_HOME", "")
    # What is not absolute counts as not set, by the specification.
    return (Path(home) if home.startswith("/") else Path.home() / ".local/state") / "earl/services"


def _note(runs_directory: Path, running: bool) -> None:
    # Without a home that can be written, the services are found from their own directory alone.
    with suppress(OSError, RuntimeError):
        note = _notes() / hashlib.sha256(os.fsencode(runs_directory)).hexdigest()[:16]
        if running:
            make_directory(note.parent, 0o700)
            write_atomic(note, os.fsencode(runs_directory))
        else:
            note.unlink(missing_ok=True)


def noted_directories() -> list[Path]:
    """Runs directories for which this user has started services; they may have ended since."""
    found = []
    with suppress(OSError, RuntimeError):
        for note in sorted(_notes().iterdir()):
            with suppress(OSError), open_file(note) as stream:
                if _is_private(stream.fileno()):
                    found.append(Path(os.fsdecode(stream.read())))
    return [path for path in found if path.is_absolute()]


def directories_with_services() -> list[Path]:
    """Runs directories of this user with a service that runs."""
    noted = noted_directories()
    return [path for path in noted if any(each.alive for each in read_services(path).values())]


def _is_private(descriptor: int) -> bool:
    """Tell whether a file is this user's, and nobody else's to read or write."""
    about = os.fstat(descriptor)
    return about.st_uid == os.geteuid() and not about.st_mode & 0o077
