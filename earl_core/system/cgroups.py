"""Control groups that count this process's memory: limits, use, and kills for lack of it.

A container has the files of version 1 or 2, mounted anywhere; `root` is where the file systems
`proc` and `sys` are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
_HOST_COUNTER = "/proc/vmstat"


class _Own(NamedTuple):
    """This process's group in one hierarchy: the version, the mount, the group's directory."""

    version: int
    mount: Path
    directory: Path


class _Limited(NamedTuple):
    """A group with a limit, in bytes."""

    version: int
    directory: Path
    limit: int


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process and all that share its limits may use: the least of the machine's and
    of the limits of all groups around it."""
    return min([_physical(), *(group.limit for group in _limited(root))])


def memory_in_use(root: Path = Path("/")) -> int:
    """Bytes of `memory_limit` that are in use now, page cache that can be dropped left out."""
    # A rank reads kills alone, and psutil's import would be a third of its start.
    import psutil

    tightest = min(_limited(root), key=lambda group: group.limit, default=None)
    if tightest is None or tightest.limit >= _physical():
        memory = psutil.virtual_memory()
        return int(memory.total - memory.available)
    used = _number(tightest.directory / _USAGE[tightest.version]) or 0
    return max(0, used - _droppable(tightest))


def out_of_memory_counters() -> dict[str, int]:
    """The kernel's counts of out-of-memory kills, as far as they can be seen from here.

    The keys are files: those of this process's group, whose children's kills they count and nobody
    else's; without one the host's counter, which has everybody's.
    """
    files: list[Path] = []
    for version, _, own in _own_groups(Path("/")):
        if version == 2:
            files.append(own / "memory.events")
        else:
            # Version 1 counts a kill in the victim's group alone, not in those above it.
            files += [own / "memory.oom_control", *own.glob("*/memory.oom_control")]
    known = {str(file): count for file in files if (count := _kills(file)) is not None}
    return known or {_HOST_COUNTER: _kills(Path(_HOST_COUNTER)) or 0}


def out_of_memory_kills_since(before: dict[str, int]) -> int:
    """How many processes were killed for memory since `before` was read.

    Others than ours may be among them, so this is a hint, not a proof.
    """
    now = out_of_memory_counters()
    return max((now[path] - before[path] for path in now.keys() & before.keys()), default=0)


def _limited(root: Path) -> list[_Limited]:
    """The process's groups and their ancestors, as far as they have a limit."""
    found = []
    for version, mount, own in _own_groups(root):
        above = [own, *own.parents]
        for directory in above[: above.index(mount) + 1]:
            limit = _number(directory / _LIMIT[version])
            if limit is not None:
                found.append(_Limited(version, directory, limit))
    return found


def _own_groups(root: Path) -> list[_Own]:
    """This process's group in each hierarchy that counts memory."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    found = []
    for line in mounts:
        fields, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        top, point = fields.split(" ")[3:5]
        version = {"cgroup": 1, "cgroup2": 2}.get(kind, 0)
        if version not in paths or (version == 1 and "memory" not in options.split(",")):
            continue
        path = paths[version]
        inside = path.removeprefix(top.rstrip("/")) if path.startswith(top) else path
        mount = root / Path(point).relative_to("/")
        own = mount / inside.lstrip("/")
        # In a container the own group's path may not exist below the mount, which then is the
        # container's own group.
        missing = ".." in own.parts or not own.is_dir()
        found.append(_Own(version, mount, mount if missing else own))
    return found


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    """The file's number; None for `max`, or where there is no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _droppable(group: _Limited) -> int:
    """Bytes of files that the kernel may drop; shared memory is none of them."""
    try:
        lines = (group.directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    prefix = "total_" if group.version == 1 else ""
    return sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


def _kills(path: Path) -> int | None:
    """The file's count of kills; None when there is none."""
    try:
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) if match else None
