"""Who holds what: the processes that have leases on files, as the kernel lists them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil


def lease_holders(paths: Iterable[Path]) -> dict[Path, list[int]]:
    """Pids that hold a lock on each of `paths`; files without one are left out.

    Read from the open files of all processes that this user may look at: the kernel's list of all
    locks, /proc/locks, leaves entries out while others come and go.
    """
    named: dict[tuple[int, int, int], Path] = {}
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            named[os.major(status.st_dev), os.minor(status.st_dev), status.st_ino] = path
    found: dict[Path, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for file in _locked_files(pid):
            if file in named:
                found.setdefault(named[file], []).append(int(pid))
    return found


def _locked_files(pid: str) -> set[tuple[int, int, int]]:
    """Device and inode of the files that the process has a lock on."""
    found = set()
    # The process, or the file, may be gone by now, or another user's.
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fdinfo"):
            with suppress(OSError):
                for line in Path(entry).read_text().splitlines():
                    # "lock: 1: FLOCK  ADVISORY  READ 1234 00:1a:5678 0 EOF"
                    fields = line.split()
                    if fields[:1] == ["lock:"] and fields[2] == "FLOCK":
                        major, minor, inode = fields[6].split(":")
                        found.add((int(major, 16), int(minor, 16), int(inode)))
    return found


def process_name(pid: int) -> str:
    """The command of a process, shortened; "gone" when there is none."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        words = []
    return " ".join(words).replace("\n", " ").strip()[:60] or "no command line"


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
    kept: dict[int, list[Path]] = {}
    for path, pids in lease_holders(path for path in filled if path.name[0] != ".").items():
        for pid in pids:
            kept.setdefault(pid, []).append(path)
    held = {pid: sum(sizes[path] for path in files) for pid, files in kept.items()}
    leases = []
    for pid in sorted(kept, key=lambda pid: -held[pid]):
        names = [path.name for path in sorted(kept[pid], key=lambda path: -sizes[path])]
        number = "1 file" if len(names) == 1 else f"{len(names)} files"
        shown = f"{number}, {held[pid]:,}: {_first(names, most)}"
        leases.append(f"{pid} {process_name(pid)!r} keeps {shown}")
    files = _first([f"{path.name} ({sizes[path]:,})" for path in filled], most)
    return f"It holds {files}. Leases: {_first(leases, most, '; ') or 'none'}"


def _first(texts: list[str], most: int, between: str = ", ") -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more
