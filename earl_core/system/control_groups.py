"""The control groups around this process, of version 1 or 2, mounted anywhere.

`root` is where the file systems `proc` and `sys` are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class OwnGroup(NamedTuple):
    """This process's group in one hierarchy: the version, the mount, the group's directory."""

    version: int
    mount: Path
    directory: Path

    def up(self) -> Iterator[Path]:
        """The group's directory, and those of all groups around it."""
        above = [self.directory, *self.directory.parents]
        yield from above[: above.index(self.mount) + 1]


def own_groups(root: Path, controller: str) -> list[OwnGroup]:
    """Return this process's group in each hierarchy of a controller, such as `memory`."""
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
        elif controller in controllers.split(","):
            paths[1] = path
    found = []
    for line in mounts:
        fields, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        top, point = fields.split(" ")[3:5]
        version = {"cgroup": 1, "cgroup2": 2}.get(kind, 0)
        if version not in paths or (version == 1 and controller not in options.split(",")):
            continue
        path = paths[version]
        inside = path.removeprefix(top.rstrip("/")) if path.startswith(top) else path
        mount = root / Path(point).relative_to("/")
        own = mount / inside.lstrip("/")
        # In a container the own group's path may not exist below the mount, which then is the
        # container's own group.
        missing = ".." in own.parts or not own.is_dir()
        found.append(OwnGroup(version, mount, mount if missing else own))
    return found


def processor_limit(root: Path = Path("/")) -> float | None:
    """Count the cores whose time this process and those that share its limits may use, the least of
    all groups around it; None: no group has a limit."""
    limits = [
        limit
        for group in own_groups(root, "cpu")
        for directory in group.up()
        if (limit := _quota(group.version, directory)) is not None
    ]
    return min(limits, default=None)


def _quota(version: int, directory: Path) -> float | None:
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        words = " ".join((directory / name).read_text() for name in names).split()
        quota, period = (int(word) for word in words)
    except (OSError, ValueError):
        return None  # no such file, or `max`
    return quota / period if quota > 0 and period > 0 else None
