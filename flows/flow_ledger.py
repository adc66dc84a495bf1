"""This machine's notes on its Prefect flow runs: the process that runs each, and how it ended.

A note is written before a flow does anything and removed once the server has the final state. One
that is left says what the server should have been told. A flow run that was killed before it had a
note is known by its tags, which it is made with; once it has one, they are labels.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from earl_core.system.files import write_atomic
from earl_core.system.processes import ProcessId

TAG = "earl"
"""Tag of every flow run of ours; prefect.yaml gives it to the flow runs that deployments start."""

_OWNER = "earl-process:"
_RUNS = "earl-runs:"


@dataclass(frozen=True)
class Note:
    """A flow run and its owner. outcome: a state's type, once the flow has ended. run, iteration:
    what the flow works on; its directory may know more than the note."""

    flow_run: str
    host: str
    process: str
    run: str = ""
    iteration: int | None = None
    outcome: str | None = None

    @property
    def here(self) -> bool:
        """True when its process is, or was, one of this host."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """True while its process still runs."""
        process = ProcessId.parse(self.process)
        return process is not None and process.alive()


def note_of(flow_run: str, run: str = "", iteration: int | None = None) -> Note:
    """A note about a flow run of this process."""
    return Note(flow_run, socket.gethostname(), str(ProcessId.current()), run, iteration)


def owner_tags(runs_directory: str | Path) -> list[str]:
    """Tags of every flow run that this process starts."""
    return [
        TAG,
        f"{_OWNER}{socket.gethostname()}/{ProcessId.current()}",
        f"{_RUNS}{_mark(runs_directory)}",
    ]


def note_from_tags(flow_run: str, tags: list[str]) -> Note | None:
    """A note about a flow run that left none; None when its tags name no process."""
    for tag in tags:
        if tag.startswith(_OWNER):
            host, _, process = tag.removeprefix(_OWNER).rpartition("/")
            return Note(flow_run, host, process)
    return None


def labels_of(tags: Iterable[str]) -> dict[str, str]:
    """Those of a flow run's tags that are not for people, as labels, which pages do not show."""
    marks = [tag for tag in tags if tag.startswith((_OWNER, _RUNS))]
    return {name: value for name, _, value in (mark.partition(":") for mark in marks)}


def marks_of(found: Mapping[str, Any]) -> list[str]:
    """Tags of a flow run as its server tells them, with those that became labels."""
    labels = found.get("labels") or {}
    names = (_OWNER.rstrip(":"), _RUNS.rstrip(":"))
    return [*found["tags"], *(f"{name}:{labels[name]}" for name in names if name in labels)]


def of_other_runs(tags: list[str], runs_directory: str | Path) -> bool:
    """Tell whether the notes about a flow run lie in another runs directory."""
    marks = [tag.removeprefix(_RUNS) for tag in tags if tag.startswith(_RUNS)]
    return bool(marks) and _mark(runs_directory) not in marks


def _mark(runs_directory: str | Path) -> str:
    return hashlib.sha256(str(Path(runs_directory).resolve()).encode()).hexdigest()[:12]


def _path(runs_directory: str | Path, flow_run: str) -> Path:
    return Path(runs_directory) / ".flow_runs" / f"{flow_run}.json"


def write(runs_directory: str | Path, note: Note) -> None:
    """Write or replace a note."""
    path = _path(runs_directory, note.flow_run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(note)).encode())


def read(runs_directory: str | Path, flow_run: str) -> Note | None:
    """The note about a flow run; None when there is none that can be read."""
    try:
        return Note(**json.loads(_path(runs_directory, flow_run).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read_all(runs_directory: str | Path) -> Iterator[Note]:
    """Every note that can be read."""
    for path in sorted((Path(runs_directory) / ".flow_runs").glob("*.json")):
        note = read(runs_directory, path.stem)
        if note is not None and note.flow_run == path.stem:
            yield note


def age(runs_directory: str | Path, note: Note) -> float:
    """Seconds since a note was written last; 0 when it is gone."""
    try:
        return time.time() - _path(runs_directory, note.flow_run).stat().st_mtime
    except OSError:
        return 0.0


def end(runs_directory: str | Path, note: Note, outcome: str | None) -> None:
    """Note how a flow ended, unless that is noted already."""
    known = read(runs_directory, note.flow_run)
    if known is not None and known.outcome is None and outcome is not None:
        write(runs_directory, replace(known, outcome=outcome))


def remove(runs_directory: str | Path, flow_run: str) -> None:
    """Forget a flow run: the server knows how it ended."""
    _path(runs_directory, flow_run).unlink(missing_ok=True)
