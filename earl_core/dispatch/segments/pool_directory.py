"""The directory of a pool: its mark, the names in it, what lies there, and the lock for new bytes.

The mark is a store's first file and says format, store and user. It is written into an empty
directory, so that all beside it came later, and checked by content: a copied, renamed or foreign
directory does not pass. A file is removed only where its directory carries our mark, it is a
regular file of this user with a name that our code makes, and it is not reached through a link.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import stat
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from earl_core.dispatch.segments.pool_usage import WEIGHTS, Held
from earl_core.system.errors import NotOurs
from earl_core.system.files import FileLock, device_of, make_parent, read_file, write_atomic
from earl_core.system.processes import ProcessId

MARK = ".store.json"
"""The file that names the owner of a store; the first file in it and the last to go."""
LIVE = ".live"
"""Locked by the run that uses the store, for as long as it lives."""
POOL_LOCK = ".pool.lock"
FETCH_LOCK = ".fetch.lock"

_UID = re.compile(r"[0-9a-f]{12}")
_SHARD = r"\d{6,18}-[A-Za-z0-9_-]{1,100}-\d{1,9}-\d{1,20}\.arrow"
_PART = r"fetch-[0-9a-f]{16}-\d{1,9}\.part"
_SEALED = re.compile(rf"{_SHARD}|{_PART}|{WEIGHTS}")
_FREE = re.compile(r"\.free\.\d{1,20}\.\d{1,20}")
_WRITING = re.compile(r"\.writing\.((?:[0-9a-f]{12}|unknown)_\d{1,20}_\d{1,20})\.\d{1,20}")
_DONE = re.compile(r"\.fetch-[0-9a-f]{16}\.\d{1,9}\.done")
_MARK_ASIDE = re.compile(r"\.?\.store\.json\.\d{1,20}\.\d{1,20}\.tmp")
SHARD_PATTERN = rf"^{_SHARD}$"


def new_uid() -> str:
    """The name of a new run among the shards and spills of all runs."""
    return uuid.uuid4().hex[:12]


def is_uid(text: object) -> bool:
    """Tell whether this can be a run's uid: nothing else may become a part of a path."""
    return isinstance(text, str) and _UID.fullmatch(text) is not None


def is_shard(name: str) -> bool:
    """Tell whether a shard can have this name."""
    return re.fullmatch(_SHARD, name) is not None


def is_sealed(name: str) -> bool:
    """Tell whether a published file can have this name: a shard, a received part, weights."""
    return _SEALED.fullmatch(name) is not None


def writer_of(name: str) -> str | None:
    """The process, as text, that the name of a file in state writing says."""
    found = _WRITING.fullmatch(name)
    return found[1] if found else None


def is_unfinished_mark(name: str) -> bool:
    """Tell whether a process that was killed while writing a mark may have left such a file."""
    return _MARK_ASIDE.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Tell whether a store's file can have this name; not `MARK` and `LIVE`, which go last."""
    patterns = (_SEALED, _FREE, _WRITING, _DONE, _MARK_ASIDE)
    return name in (POOL_LOCK, FETCH_LOCK) or any(p.fullmatch(name) for p in patterns)


def is_own_file(status: os.stat_result) -> bool:
    """Tell whether this, by `lstat`, is a regular file of this user, and so no link either."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def own_status(path: Path) -> os.stat_result | None:
    """The status of a regular file of this user; None for anything else, or nothing."""
    with suppress(OSError):
        status = path.lstat()
        return status if is_own_file(status) else None
    return None


def unlink_own(path: Path) -> bool:
    """Remove a regular file of this user; False, and nothing happens, for anything else."""
    with suppress(OSError):
        if is_own_file(path.lstat()):
            path.unlink()
            return True
    return False


_FORMAT = "earl.store/1"


@dataclass(frozen=True)
class StoreMark:
    """The content of a store's mark.

    run_directory: of the run whose store it is; None where no run owns it. device: number of the
    file system that the run directory lies on; None in an older mark. time: when the run last
    claimed it, in seconds since 1970.
    """

    run_directory: Path | None
    device: int | None
    time: float


def read_mark(directory: Path) -> StoreMark | None:
    """The mark of a directory of this user that is a store; None for any other directory."""
    try:
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        if own_status(directory / MARK) is None:
            return None
        content = json.loads(read_file(directory / MARK))
        whose = (content["format"], content["store"], content["user"])
        if whose != (_FORMAT, _name(directory), os.geteuid()):
            return None
        owner = content["run_directory"]
        return StoreMark(
            run_directory=Path(owner) if owner is not None else None,
            device=content.get("device"),
            time=float(content["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_store(directory: Path, attempts: int = 20) -> None:
    """Make a store's directory, mode 0700, and mark it; nothing happens to one that is marked.

    Raises `NotOurs` for a link, a directory of another user, or one that holds anything, and when
    the user's directory is not the user's alone; other `OSError` when it cannot be made.
    """
    make_parent(directory)
    if read_mark(directory) is not None:
        return
    try:
        directory.mkdir(mode=0o700)
    except FileNotFoundError:
        # Another run, the last one in it, has just removed the parent. Some file systems say this
        # always.
        if attempts == 1:
            raise
        return make_store(directory, attempts - 1)
    except FileExistsError:
        _check_empty(directory)
        if read_mark(directory) is not None:
            return  # another process of the run was faster
        directory.chmod(0o700)
    write_mark(directory, None)


def write_mark(directory: Path, run_directory: Path | None) -> None:
    """Say, atomically, whose store this is from now on."""
    content = {
        "format": _FORMAT,
        "store": _name(directory),
        "user": os.geteuid(),
        "run_directory": str(run_directory) if run_directory is not None else None,
        "device": device_of(run_directory) if run_directory is not None else None,
        "time": time.time(),
    }
    write_atomic(directory / MARK, json.dumps(content).encode())


def _check_empty(directory: Path) -> None:
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise NotOurs(errno.ENOTDIR, f"{directory} is a link or a file, not a folder: remove it")
    if status.st_uid != os.geteuid():
        raise NotOurs(errno.EPERM, f"{directory} belongs to another user: choose another folder")
    # What a process that was killed while it wrote the mark left.
    left = [name for name in os.listdir(directory) if not is_unfinished_mark(name)]
    if left and read_mark(directory) is None:
        raise NotOurs(
            errno.ENOTEMPTY,
            f"{directory} holds files that are not of a store, such as {left[0]}: move them away, "
            "or choose another folder",
        )


def _name(directory: Path) -> str:
    return Path(os.path.abspath(directory)).name


FREE = ".free."
WRITING = ".writing."
SEGMENT_MODE = 0o1600
SMALLEST = max(16 * 1024, 4 * mmap.PAGESIZE)
"""Bytes of the least segment. Sizes come in four classes per octave, so that a recycled segment
fits the next shard."""
_LOCK_SECONDS = 30.0  # the lock is held for microseconds; only a stopped process keeps it


class PoolDirectory:
    """Names and sizes of a pool's files. A segment's state is its name."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._marked: tuple[int, int] | None = None

    def make(self) -> None:
        """Make and mark the directory. Raises `OSError` for one that cannot be a store."""
        if not self.is_marked():
            make_store(self.directory)

    def is_marked(self) -> bool:
        """True when the directory is a store of ours, so that files may be removed from it."""
        try:
            status = os.lstat(self.directory)
        except OSError:
            return False
        # Looked at once: whatever takes a store's place is another inode.
        if self._marked != (status.st_dev, status.st_ino):
            self._marked = None
            if read_mark(self.directory) is not None:
                self._marked = (status.st_dev, status.st_ino)
        return self._marked is not None

    def own(self, name: str) -> Path | None:
        """The path of a regular file of this user in a marked directory; None otherwise."""
        path = self.directory / name
        return path if self.is_marked() and own_status(path) is not None else None

    def free_path(self, status: os.stat_result) -> Path:
        """The name of this segment while it is free: it follows from the inode."""
        return self.directory / f"{FREE}{status.st_size}.{status.st_ino}"

    def new_writing_path(self) -> tuple[Path, int]:
        """A name in state writing of this process, and the generation in it."""
        generation = _identity.next_generation()
        return self.directory / f"{WRITING}{_identity.process()}.{generation}", generation

    def names(self, prefix: str = "") -> list[str]:
        """Names of the files, hidden ones included; empty without a directory."""
        try:
            return [name for name in os.listdir(self.directory) if name.startswith(prefix)]
        except FileNotFoundError:
            return []

    def free(self) -> list[tuple[int, str]]:
        """Size and name of the free segments, ascending."""
        found = []
        for name in self.names(FREE):
            status = own_status(self.directory / name)
            if status is not None and self.free_path(status).name == name:
                found.append((status.st_size, name))
        return sorted(found)

    def dead_writing(self) -> list[Path]:
        """Files in state writing whose process is gone."""
        dead = []
        for name in self.names(WRITING):
            text = writer_of(name)
            owner = ProcessId.parse(text) if text is not None else None
            if owner is not None and not owner.alive() and self.own(name) is not None:
                dead.append(self.directory / name)
        return dead

    def used_bytes(self) -> int:
        """Bytes of all files but the mark."""
        return sum(size for _, size in self._files())

    def held(self) -> Held:
        """The bytes of published weights, and of all else but the mark."""
        return Held.of(self._files())

    def _files(self) -> list[tuple[str, int]]:
        """Name and bytes of all files here but the mark, at one moment, while others rename."""
        sizes: dict[int, tuple[str, int]] = {}
        unknown = self._listing()
        while unknown:
            moved = []
            for inode, name in unknown.items():
                try:
                    sizes[inode] = name, os.lstat(self.directory / name).st_size
                except FileNotFoundError:
                    moved.append(inode)
            # What was renamed between listing and looking is found by its inode. Counting it as
            # nothing would let the pool grow beyond its limit.
            listed = self._listing() if moved else {}
            unknown = {inode: listed[inode] for inode in moved if inode in listed}
        return list(sizes.values())

    def _listing(self) -> dict[int, str]:
        """Names by inode."""
        try:
            with os.scandir(self.directory) as entries:
                return {e.inode(): e.name for e in entries if e.name != MARK}
        except FileNotFoundError:
            return {}

    def available_bytes(self) -> int | None:
        """Bytes free on the file system; None where it has no limit."""
        status = os.statvfs(self.directory)
        # A tmpfs without a limit reports no blocks at all.
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def locked(self) -> FileLock:
        """Makes the directory, and lets one process of the run at a time count new bytes. Raises
        `TimeoutError` when another keeps the lock for half a minute."""
        path = self.directory / POOL_LOCK
        while True:
            self.make()
            try:
                return FileLock(path, _LOCK_SECONDS)
            except FileNotFoundError:
                continue  # the store was removed at this moment
            except BlockingIOError:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"{path} has been locked for {_LOCK_SECONDS:.0f} s: a process of this run "
                    "hangs; look for it in /proc/locks and end it",
                ) from None


def size_class(size: int) -> int:
    """The least class of at least `size` bytes: 16 KiB, 20, 24, 28, 32, 40, ... always whole pages.

    From 16 KiB on a class is at most a quarter larger than what was asked for. Raises `ValueError`
    for a negative size.
    """
    if size < 0:
        raise ValueError(f"a segment cannot have {size} bytes")
    if size <= SMALLEST:
        return SMALLEST
    octave = 1 << (size.bit_length() - 1)
    quarter = octave // 4
    return -(-size // quarter) * quarter


def is_whole_segment(status: os.stat_result) -> bool:
    """Tell whether this is a segment with all its pages; others are removed, not recycled.

    Segments carry the sticky bit, which the kernel ignores on files. One whose process was killed
    while pages were allocated has holes: writing to it could be SIGBUS.
    """
    return (
        is_own_file(status)
        and bool(status.st_mode & stat.S_ISVTX)
        and status.st_nlink == 1
        and status.st_blocks * 512 >= status.st_size > 0
    )


class _Identity:
    """This process's name, and generations that rise within it."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._process: str | None = None
        self._generation = 0

    def process(self) -> str:
        # Kept, because finding out the start time costs more than all of recycling a segment.
        if self._process is None:
            self._process = str(ProcessId.current())
        return self._process

    def next_generation(self) -> int:
        with self._lock:
            self._generation = max(self._generation + 1, time.time_ns())
            return self._generation


_identity = _Identity()
os.register_at_fork(after_in_child=_identity.after_fork_in_child)
