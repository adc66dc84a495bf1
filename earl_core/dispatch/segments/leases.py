"""Leases: segments mapped read-only, cached by this process, protected while they are read.

A lease is a shared `flock` on a descriptor of its own, taken when the first reader of this process
comes and given back when the last view is gone; the kernel gives it back when the process dies. A
segment under a lease is never recycled. The mapping stays cached when the lease goes, so that the
page tables of a recycled segment are built once: reading it again costs microseconds.

The mapping goes through another open file description than the lock. A lock lives as long as its
description, and a forked child inherits the parent's mappings: through one description the child
would keep alive the leases of a killed parent.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from earl_core.dispatch.segments.page_lock import PageLock
from earl_core.system.errors import EarlError

_MOST_NAMED = 5  # files and leases that a message names
_MAX_IDLE = 128  # mappings without a lease that stay cached; each costs two descriptors
_BUSY_SECONDS = 5.0  # a releaser holds its lock for microseconds; one that was stopped, for ever
_MOST_NAMED = 5  # files, or processes, of a full pool that its error names


class ShardMismatch(EarlError, OSError):
    """The file is not what its reader was told: of another size, empty, or no plain file."""

    expected = False


class Mapped:
    """A file mapped read-only under a lease. Safe to inherit by a fork, whose lease stays ours."""

    def __init__(
        self, memory: memoryview, source: weakref.ref[np.ndarray], path: Path, lock: PageLock
    ) -> None:
        self._memory: memoryview | None = memory
        self._source = source
        self._lock = lock
        self.path = path
        self.size = memory.nbytes

    @property
    def memory(self) -> memoryview:
        """The whole file, uint8. Everything made from it counts as a view."""
        if self._memory is None:
            raise ValueError(f"the lease on {self.path} was given back; read it anew")
        return self._memory

    def page_lock(self) -> bool:
        """Have a GPU read the memory by itself; whether it can. Stays when the lease goes."""
        return self._lock.take()

    def close(self) -> None:
        """Give the lease back. Raises `BufferError`, and keeps it, while a view is alive. A
        `Mapped` that is dropped without closing gives its lease back with its last view."""
        if self._memory is None:
            return
        self._memory = None
        source = self._source()
        if source is not None:
            self._memory = source.data
            del source  # the traceback must not be one more view
            raise BufferError(
                f"views of {self.path} are still alive; delete them, or copy what you need, "
                "before giving the lease back"
            )
        _cache.settle()


def map_shared(path: Path, size: int) -> Mapped:
    """Take a lease on `path` and map its `size` bytes read-only.

    Raises `FileNotFoundError` when nothing has this name or it was released at this moment,
    `ShardMismatch` when the file has another size, `OSError` when it cannot be mapped.
    """
    return _cache.lease(path, size)


class _Entry:
    """One mapped inode of this process, and the leases that are out on it."""

    def __init__(self, key: tuple[int, int], descriptor: int, mapping: mmap.mmap) -> None:
        self.key = key
        self.descriptor = descriptor
        self.mapping = mapping
        self.page_lock = PageLock(mapping, read_only=True)
        self.size = len(mapping)
        # Weak references, by id, to the arrays under the views: one dies with the last view of
        # its lease. (A reference to an array has no hash.)
        self.out: dict[int, weakref.ref[np.ndarray]] = {}
        self.on_last_view: Callable[[weakref.ref[np.ndarray]], None] | None = None

    def unlock(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        self.on_last_view = None
        self.page_lock.release()
        self.mapping.close()
        os.close(self.descriptor)


class _MappingCache:
    """Mappings of this process by inode, least recently used first."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._returned: deque[tuple[_Entry, weakref.ref[np.ndarray]]] = deque()

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._drain()

    def lease(self, path: Path, size: int) -> Mapped:
        with self._held():
            key = _inode(path)
            if key is None:
                raise _gone(path)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._open(path)
            else:
                self._entries.move_to_end(key)
                # Under a lease of ours the name just seen cannot have been released since.
                if not entry.out:
                    _take_lock(entry.descriptor, key, path)
            try:
                if entry.size != size:
                    raise ShardMismatch(
                        errno.EINVAL, f"{path} has {entry.size} bytes, its manifest says {size}"
                    )
                source = np.frombuffer(entry.mapping, dtype=np.uint8)
                reference = weakref.ref(source, entry.on_last_view)
                memory = source.data
                entry.out[id(reference)] = reference
            except BaseException:
                if not entry.out:
                    entry.unlock()
                raise
            del source
            return Mapped(memory, reference, path, entry.page_lock)

    def _open(self, path: Path) -> _Entry:
        self._drop_idle(_MAX_IDLE - 1)
        try:
            entry = self._map(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            self._drop_idle(0)
            entry = self._map(path)

        def on_last_view(reference: weakref.ref[np.ndarray], entry: _Entry = entry) -> None:
            # Runs wherever the last view dies, even inside of this cache: only note it.
            self._returned.append((entry, reference))
            self._drain()

        entry.on_last_view = on_last_view
        self._entries[entry.key] = entry
        return entry

    @staticmethod
    def _map(path: Path) -> _Entry:
        """Open, lock and map `path`; the lease is taken on return."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise _gone(path) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _not_a_file(path) from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _not_a_file(path)
            if status.st_size == 0:
                raise ShardMismatch(errno.EINVAL, f"{path} is empty: nothing was written to it")
            key = status.st_dev, status.st_ino
            _take_lock(descriptor, key, path)
            try:
                second = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                raise _gone(path) from None
            try:
                mapping = mmap.mmap(second, status.st_size, prot=mmap.PROT_READ)
            finally:
                os.close(second)
            return _Entry(key, descriptor, mapping)
        except BaseException:
            os.close(descriptor)
            raise

    def settle(self) -> None:
        """Give back what is due, even if another thread has the lock at this moment."""
        with self._held():
            self._give_back()

    def _drain(self) -> None:
        # A holder of the lock drains after letting it go, so nothing noted meanwhile is lost.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._give_back()
            finally:
                self._lock.release()

    def _give_back(self) -> None:
        while self._returned:
            entry, reference = self._returned.popleft()
            entry.out.pop(id(reference), None)
            if not entry.out and entry.descriptor >= 0:
                entry.unlock()

    def _drop_idle(self, keep: int) -> None:
        """Unmap idle entries: all whose file has no name left, then the oldest beyond `keep`."""
        dropped: list[_Entry] = []
        alive: list[_Entry] = []
        for entry in self._entries.values():
            if not entry.out:
                named = os.fstat(entry.descriptor).st_nlink > 0
                (alive if named else dropped).append(entry)
        dropped += alive[: max(0, len(alive) - keep)]
        for entry in dropped:
            del self._entries[entry.key]
            entry.close()

    def before_fork(self) -> bool:
        # So that no thread is between opening a descriptor and noting it.
        return self._lock.acquire(timeout=1.0)

    def after_fork_in_child(self) -> None:
        """Forget the parent's leases: closing their descriptors here does not unlock them."""
        for entry in self._entries.values():
            os.close(entry.descriptor)
            entry.descriptor = -1
        self.reset()


def _take_lock(descriptor: int, key: tuple[int, int], path: Path) -> None:
    """Take the lease, then make sure that `path` still names this inode."""
    patience = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # Somebody releases it; the name is about to go.
            if _inode(path) != key:
                raise _gone(path) from None
            if time.monotonic() > patience:
                raise OSError(
                    errno.EWOULDBLOCK,
                    f"{path} has been locked exclusively for {_BUSY_SECONDS:.0f} s: a process "
                    "that was releasing it hangs; look for it in /proc/locks and end it",
                ) from None
            time.sleep(0.0002)
    if _inode(path) != key:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        raise _gone(path)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _gone(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, f"the shard {path} is gone: it was released or removed")


def _not_a_file(path: Path) -> ShardMismatch:
    return ShardMismatch(errno.EINVAL, f"{path} is no plain file: a link, a folder or a pipe")


_cache = _MappingCache()
_fork_ready = threading.local()


def _before_fork() -> None:
    _fork_ready.held = _cache.before_fork()


def _after_fork_in_parent() -> None:
    if _fork_ready.held:
        _cache._lock.release()
        _cache._drain()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_cache.after_fork_in_child,
)


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


def describe_holders(paths: Iterable[Path]) -> str:
    """Describe the content of a full pool: its largest files, and every process whose leases keep
    files, with all of them however small, because only those cannot be released."""
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
        shown = f"{number}, {held[pid]:,}: {_first(names)}"
        leases.append(f"{pid} {process_name(pid)!r} keeps {shown}")
    files = _first([f"{path.name} ({sizes[path]:,})" for path in filled])
    return f"It holds {files}. Leases: {_first(leases, '; ') or 'none'}"


def _first(texts: list[str], between: str = ", ") -> str:
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return between.join(texts[:_MOST_NAMED]) + more
