"""Files that are whole or absent, also after a power cut; reads that nothing can block; file locks.

A file is written aside, synced and renamed into place, and then the directory that names it is
synced: a name that no sync has reached may be gone after a power cut, whatever the file holds.

`user_directory` is the directory in shared memory that is this user's alone, where stores lie
unless told otherwise. Shared memory is writable for everyone, so its name says whose it is, and it
is used only when nobody else can have put anything into it.

Locks go with their holder. They are open file description locks (`F_OFD_SETLK`): one belongs to an
open file, so that threads exclude each other too, and it is gone when the last descriptor is
closed, also by SIGKILL. Asking who holds one (`F_OFD_GETLK`) takes nothing, so that an onlooker
never stands in the way, and it is answered by the kernel for the inode: processes of other
containers and mount namespaces count.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import psutil

from earl_core.system.errors import ConfigError, NotOurs
from earl_core.system.storage_errors import naming

_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "afs", "lustre", "gpfs", "beegfs", "ceph",
     "glusterfs", "pvfs2", "orangefs", "panfs", "wekafs")
)  # fmt: skip


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` so that `path` never holds half of it; on disk when this returns. mode: who may
    read the file; by default its owner alone: it may hold what others must not see."""
    with writing_atomic(path, mode) as descriptor:
        write_all(descriptor, data)


@contextmanager
def writing_atomic(path: Path, mode: int = 0o600) -> Iterator[int]:
    """A descriptor for the file's bytes, which `path` holds, on disk, once the block has ended
    without an error. mode: as of `write_atomic`. Raises `NotWritten`, and other `OSError`."""
    with naming(path):
        make_directory(path.parent)
        yield from _aside(path, mode)


def _aside(path: Path, mode: int) -> Iterator[int]:
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
    """Make a directory and what is missing above it, each on disk when this returns. mode: who may
    enter the directory itself, where it is made here."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with naming(path):
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


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Have `target` be a file of the same bytes; where the file system allows it one that shares
    them, so only for what is never written again. Symbolic links are followed."""
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def remove(path: Path) -> None:
    """Remove a directory with all in it, or whatever else lies there; follows no link.
    `shutil.rmtree` opens what it is given, and waits for ever on a FIFO."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def is_regular(path: Path) -> bool:
    """Tell whether a regular file lies there, itself and not through a link."""
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
    """Raise `NotOurs` when `path` is this user's directory and others could reach into it. Nothing
    is asked of another directory: whoever names it chose it."""
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


_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid; struct flock of 64-bit Linux
_PAUSE = 0.001  # seconds between tries
_WHOLE = 0  # a length: to the end of the file, however far it grows


def lock_bytes(descriptor: int, start: int = 0, length: int = _WHOLE) -> bool:
    """Lock bytes for this open file; False when another open file has them."""
    return _change(descriptor, fcntl.F_WRLCK, start, length)


def unlock_bytes(descriptor: int, start: int = 0, length: int = _WHOLE) -> None:
    """Give bytes back that this open file has locked."""
    _change(descriptor, fcntl.F_UNLCK, start, length)


def _change(descriptor: int, kind: int, start: int, length: int) -> bool:
    try:
        request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_held(path: Path) -> bool:
    """Tell whether somebody has `path` locked. Takes nothing. A file that cannot be looked at
    counts as held: callers ask whether it may be removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, _WHOLE, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(descriptor)


class FileLock:
    """A locked file, made if it was not there, until `release`; a context manager too.

    Raises `BlockingIOError` when another has it for longer than `wait_seconds`, and `OSError` when
    `path` is a link, a folder or anything but a plain file.
    """

    def __init__(self, path: Path, wait_seconds: float = 0.0) -> None:
        self.path = path
        deadline = time.monotonic() + wait_seconds
        while (descriptor := self._try()) < 0:
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EWOULDBLOCK, f"{path} is locked by another process")
            time.sleep(_PAUSE)
        self._descriptor = descriptor

    def _try(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with naming(self.path):
            descriptor = os.open(self.path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, f"{self.path} is not a plain file: remove it")
            # Whoever had it may have removed the name meanwhile: then this is nobody's lock.
            if lock_bytes(descriptor) and os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return -1

    def read(self) -> str:
        """Read the text that the holder wrote."""
        return os.pread(self._descriptor, 64, 0).decode(errors="replace").strip()

    def write(self, text: str) -> None:
        """Replace what the file says, for people to read."""
        with naming(self.path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Give the lock back; harmless when it was given back already."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Said, not left to closing: a child forked meanwhile has the descriptor too.
            unlock_bytes(descriptor)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
