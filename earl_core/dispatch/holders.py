"""Who holds what: the processes that have leases on files, as the kernel lists them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LOCKS = Path("/proc/locks")


def lease_holders(paths: Iterable[Path]) -> dict[Path, list[int]]:
    """Pids that hold a lock on each of `paths`; files without one are left out.

    Read from /proc/locks, so a process of another pid namespace shows as pid 0; empty where the
    kernel has no such list.
    """
    named: dict[tuple[int, int, int], Path] = {}
    for path in paths:
        try:
            status = path.lstat()
        except OSError:
            continue
        device = status.st_dev
        named[os.major(device), os.minor(device), status.st_ino] = path
    found: dict[Path, list[int]] = {}
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        # "1: FLOCK  ADVISORY  READ  1234 00:1a:5678 0 EOF"; a waiting one has "->" after "1:".
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK":
            continue
        major, minor, inode = fields[5].split(":")
        held = named.get((int(major, 16), int(minor, 16), int(inode)))
        if held is not None:
            found.setdefault(held, []).append(int(fields[4]))
    return found


def process_name(pid: int) -> str:
    """The command of a process, shortened; "gone" when there is none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    text = " ".join(os.fsdecode(word) for word in words if word).replace("\n", " ")
    return text[:60] or "no command line"


def describe_holders(paths: Iterable[Path], most: int = 5) -> str:
    """A sentence naming the largest of the files and the processes that keep them."""
    sizes: dict[Path, int] = {}
    for path in paths:
        with suppress(OSError):
            sizes[path] = path.lstat().st_size
    largest = sorted((path for path in sizes if sizes[path]), key=lambda path: -sizes[path])[:most]
    if not largest:
        return "It holds nothing"
    holders = lease_holders(largest)
    listed = [f"{path.name} ({sizes[path]:,}{_keepers(path, holders)})" for path in largest]
    return f"It holds {', '.join(listed)}"


def _keepers(path: Path, holders: dict[Path, list[int]]) -> str:
    pids = holders.get(path, [])
    named = ", ".join(f"{pid} {process_name(pid)!r}" for pid in pids[:3])
    more = f" and {len(pids) - 3} more" if len(pids) > 3 else ""
    return f", leased by {named}{more}" if pids else ""
