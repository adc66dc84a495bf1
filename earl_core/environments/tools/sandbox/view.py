"""The files that the code sees: Python and the system's libraries to read, a folder to write."""

from __future__ import annotations

import os
import re
import sys

from earl_core.environments.tools.sandbox import kernel

FOLDER = "/tmp"
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
_SETTINGS = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_IN_PREFIX = ("bin", "lib", "lib64", "pyvenv.cfg")
_FOLDER_BYTES, _SHARED_BYTES, _FILES = 64 << 20, 16 << 20, 8192
_KEPT_FLAGS = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of a mount, as statvfs and as mount(2) have them: a namespace may not take them off."""


def readable_paths() -> list[str]:
    """List the paths that Python needs here, none inside of another. Not all of an interpreter's
    prefix is among them: it may be somebody's home."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    wanted = {os.path.join(prefix, part) for prefix in prefixes for part in _IN_PREFIX}
    wanted |= {*_SYSTEM, *_SETTINGS}
    wanted |= {os.path.realpath(path) for path in wanted if not path.startswith("/etc/")}
    found: list[str] = []
    for path in sorted(filter(os.path.exists, wanted)):
        if path != "/" and not any(path.startswith(f"{above}/") for above in found):
            found.append(path)
    return found


def enter(base: str) -> None:
    """Make a root of its own, mounted at the folder `base`, for this mount namespace. Raises
    `OSError` where a part of it cannot be had, apart from `/proc`, which is then empty."""
    base = os.path.realpath(base)
    kernel.attach(None, "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    held = kernel.NO_SUID | kernel.NO_DEVICES
    kernel.attach("tmpfs", base, "tmpfs", held, "mode=755,size=4m")
    for path in readable_paths():
        _bind(path, base)
    for mounted in mounts_below(base):
        kernel.attach(None, mounted, None, flags_of(mounted) | held | kernel.READ_ONLY)
    for path in DEVICES:
        _bind(path, base)
    for path, size in ((FOLDER, _FOLDER_BYTES), ("/dev/shm", _SHARED_BYTES)):
        os.makedirs(base + path)
        data = f"mode=1777,size={size},nr_inodes={_FILES}"
        kernel.attach("tmpfs", base + path, "tmpfs", held, data)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{base}/dev/{name}")
    os.symlink("/proc/self/fd", f"{base}/dev/fd")
    os.mkdir(base + "/proc")
    try:
        kernel.attach("proc", base + "/proc", "proc", held | kernel.NO_PROGRAMS)
    except OSError:  # a container that hides parts of its own allows no other
        pass
    kernel.pivot_root(base)
    kernel.attach(None, "/", None, kernel.REMOUNT | kernel.BIND | held | kernel.READ_ONLY)
    os.chdir(FOLDER)


def _bind(path: str, base: str) -> None:
    target = base + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.attach(path, target, None, kernel.BIND | kernel.RECURSIVE)


def mounts_below(base: str) -> list[str]:
    """List the mount points in the folder `base`, itself left out."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        escaped = [line.split(" ", 5)[4] for line in stream]
    points = [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), each) for each in escaped]
    return [each for each in points if each.startswith(f"{base}/")]


def flags_of(mounted: str) -> int:
    """What changes a mount without taking off a flag that it has."""
    had = os.statvfs(mounted).f_flag
    kept = sum(new for old, new in _KEPT_FLAGS.items() if had & old)
    return kernel.REMOUNT | kernel.BIND | kept
