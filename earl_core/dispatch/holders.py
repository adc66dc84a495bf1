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
        # The kernel gives the list page by page, and leaves an entry out between two pages when one
        # before it goes meanwhile: so it is read more than once.
        lines = {
            line.partition(":")[2] for _ in range(3) for line in _LOCKS.read_text().splitlines()
        }
    except OSError:
        return {}
    for line in lines:
        # "FLOCK  ADVISORY  READ  1234 00:1a:5678 0 EOF"; a waiting one begins with "->".
        fields = line.split()
        if len(fields) < 5 or fields[0] != "FLOCK":
            continue
        major, minor, inode = fields[4].split(":")
        held = named.get((int(major, 16), int(minor, 16), int(inode)))
        if held is not None:
            found.setdefault(held, []).append(int(fields[3]))
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
    """What fills a pool: its largest files, and every process whose leases keep files, with all of
    them however small, because only those cannot be released."""
    sizes: dict[Path, int] = {}
    for path in paths:
        with suppress(OSError):
            sizes[path] = path.lstat().st_size
    filled = sorted((path for path in sizes if sizes[path]), key=lambda path: -sizes[path])
    if not filled:
        return "It holds nothing"
    listed = ", ".join(f"{path.name} ({sizes[path]:,})" for path in filled[:most])
    more = f" and {len(filled) - most} smaller files" if len(filled) > most else ""
    return f"It holds {listed}{more}. {_leases(filled, sizes, most)}"


def _leases(filled: list[Path], sizes: dict[Path, int], most: int) -> str:
    """Which processes keep which of the files, whoever keeps most bytes first."""
    kept: dict[int, list[Path]] = {}
    for path, pids in lease_holders(path for path in filled if path.name[0] != ".").items():
        for pid in set(pids):
            kept.setdefault(pid, []).append(path)
    if not kept:
        return "No process has a lease on any of them"

    def held(pid: int) -> int:
        return sum(sizes[path] for path in kept[pid])

    parts = []
    for pid in sorted(kept, key=held, reverse=True)[:most]:
        files = sorted(kept[pid], key=lambda path: -sizes[path])
        number = f"{len(files)} files" if len(files) > 1 else "1 file"
        names = ", ".join(path.name for path in files[:most])
        rest = f" and {len(files) - most} more" if len(files) > most else ""
        parts.append(f"{pid} {process_name(pid)!r} keeps {number}, {held(pid):,}: {names}{rest}")
    others = f"; {len(kept) - most} more processes keep some" if len(kept) > most else ""
    return f"Leases: {'; '.join(parts)}{others}"
