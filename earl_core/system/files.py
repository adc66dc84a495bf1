"""Files that are whole or absent, also after a power cut, and reads that nothing can block.

A file is written aside, synced and renamed into place, and then the directory that names it is
synced: a name that no sync has reached may be gone after a power cut, whatever the file holds.

`user_directory` is the directory in shared memory that is this user's alone, where stores lie
unless told otherwise. Shared memory is writable for everyone, so its name says whose it is, and it
is used only when nobody else can have put anything into it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from earl_core.system.errors import ConfigError, NotOurs

_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "afs", "lustre", "gpfs", "beegfs", "ceph",
     "glusterfs", "pvfs2", "orangefs", "panfs", "wekafs")
)  # fmt: skip


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` so that `path` never holds half of it; on disk when this returns.

    mode: who may read the file; by default its owner alone, for it may hold what others must not
    see.
    """
    with writing_atomic(path, mode) as descriptor:
        write_all(descriptor, data)


@contextmanager
def writing_atomic(path: Path, mode: int = 0o600) -> Iterator[int]:
    """A descriptor for the file's bytes, which `path` holds, on disk, once the block has ended
    without an error. mode: as of `write_atomic`."""
    make_directory(path.parent)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        descriptor = os.open(aside, flags, mode)
        try:
            os.fchmod(descriptor, mode)
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def device_of(path: Path) -> int:
    """Number of the file system that a path lies on; of one that is not there, would lie on."""
    return existing(path).stat().st_dev


def refuse_network(database: Path, remedy: str) -> None:
    """Raise `ConfigError` where an SQLite database would lie on a network file system: its locks
    do not hold there, and what it has written may be lost."""
    place = existing(database).resolve()
    mounts = [
        each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)
    ]
    kind = max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""
    if kind.removeprefix("fuse.") in _NETWORK:
        raise ConfigError(
            f"{database} would be an SQLite database on a network file system ({kind}), which can "
            "damage it",
            remedy=remedy,
        )


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def write_all(descriptor: int, data: bytes) -> None:
    """Write the whole of `data`; a single write may stop short of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and what is missing above it, each on disk when this returns.

    mode: who may enter the directory itself, where it is made here.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=mode, exist_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file's bytes, or a directory's names, on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path, follow_links: bool = False) -> bytes:
    """A regular file's content. Never waits, whatever lies there.

    follow_links: for files that people name; ours are never links. Raises `NotOurs` for anything
    else, a folder or a FIFO, and other `OSError`.
    """
    with open_file(path, follow_links) as stream:
        return stream.read()


def open_file(path: Path, follow_links: bool = False) -> BinaryIO:
    """A regular file for reading; arguments and errors of `read_file`."""
    links = 0 if follow_links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | links)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(errno.ELOOP, "a link, not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotOurs(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def remove(path: Path) -> None:
    """Remove a directory with all in it, or whatever else lies there; follows no link.

    `shutil.rmtree` opens what it is given, and waits for ever on a FIFO.
    """
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def is_regular(path: Path) -> bool:
    """Whether a regular file lies there, itself and not through a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def private(name: str, flags: int) -> int:
    """An `opener` for `open`: what it creates is readable by its owner alone."""
    return os.open(name, flags, 0o600)


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces; refuses NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def user_directory() -> Path:
    """`/dev/shm/earl-<user id>`."""
    return Path(f"/dev/shm/earl-{os.geteuid()}")


def check_user_directory(path: Path) -> None:
    """Raise `NotOurs` when `path` is this user's directory and others could reach into it.

    Nothing is asked of another directory: whoever names it chose it.
    """
    if path != user_directory():
        return
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        wrong = "is a link or a file, not a folder"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}"
    elif mode & 0o077:
        wrong = f"is open to others (mode {mode:04o})"
    else:
        return
    raise NotOurs(
        f"{path}, where shards of this user lie, {wrong}",
        remedy="remove it, or set dispatch.directory to another folder on tmpfs",
    )


def make_parent(directory: Path) -> None:
    """Make the directory that `directory` lies in, mode 0700. Raises as `check_user_directory`."""
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_user_directory(directory.parent)


def remove_when_empty(path: Path) -> None:
    """Remove this user's directory when nothing lies in it; no other directory."""
    if path == user_directory():
        with suppress(OSError):
            path.rmdir()
