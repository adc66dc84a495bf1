"""Recycled segments of shared memory: files whose pages are already there.

A fresh page of shared memory costs about ten times a copy into one that is faulted, so a released
segment is not removed but used again. Its state is its name in the run's directory:

    .free.<bytes>.<inode>  →  .writing.<ProcessId>.<generation>  →  <the name it was sealed under>

and back. Every move is one atomic rename, so of two processes that want the same segment one gets
it, and a crash at any point leaves a state that others can deal with. Sealed files are never
truncated or rewritten; they become free under an exclusive lock, which no one gets while a reader
has a lease. Because the free name follows from the inode, a process can ask for the very segments
that it has mapped, whose page tables are built (affinity).

Published weights are segments of exactly their size in the same directory, and do not count for its
limit: they, and segments as large, have the room that they need, and no shard gets it. Whatever
else lies there counts, but it is not ours: nothing happens to a file unless the directory carries
our mark, the file's name is one that our code gives (`dispatch.names`) and it is a regular file of
this user.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from earl_core.dispatch.segments.leases import describe_holders
from earl_core.dispatch.segments.pool_directory import (
    FREE,
    LIVE,
    MARK,
    SEGMENT_MODE,
    PoolDirectory,
    is_ours,
    is_sealed,
    is_whole_segment,
    size_class,
    unlink_own,
)
from earl_core.dispatch.segments.pool_usage import Held
from earl_core.dispatch.segments.segment import Segment, WritableMapping, writable_mappings
from earl_core.system.errors import EarlError
from earl_core.system.shared_memory import VERSIONS, file_system_bytes, shards_limit

logger = logging.getLogger(__name__)

_PAUSES = (0.002, 0.05)  # seconds between looks at a full pool, growing from the first
_SWEEP_SECONDS = 0.1

_T = TypeVar("_T")


class PoolFull(EarlError, OSError):
    """Shared memory, or this run's share of it, is used up; `errno` is ENOSPC."""


class SegmentPool(PoolDirectory):
    """The segments of one run on this host, shared by its processes through `directory` alone.

    `max_bytes` bounds all files in the directory but published weights; None: their bound follows
    from the file system (`system.shared_memory.SHARE`) and the number of `versions` of weights. A
    full pool makes `acquire` and `reserve` wait up to `wait_seconds` for a release. With `poison`
    (or EARL_POISON=1) released segments are filled with 0xA5, so that late reads show.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int | None,
        wait_seconds: float = 0.0,
        poison: bool = False,
        versions: int = VERSIONS,
    ) -> None:
        super().__init__(directory)
        self.max_bytes = max_bytes
        self.wait_seconds = wait_seconds
        self.versions = versions
        self.poison = poison or os.environ.get("EARL_POISON") == "1"

    def acquire(self, size: int, exact: bool = False) -> Segment:
        """A segment of at least `size` bytes, in the smallest size class where there is room.

        exact: of just this size, for a file whose format has no room for a gap.
        Its pages are allocated, so that writing cannot fail. A recycled one where possible, this
        process's own mappings first. Raises `PoolFull` when it fits neither within `max_bytes` nor
        on the file system before the deadline, `ValueError` for a negative size.
        """
        wanted = size if exact else size_class(size)

        def attempt() -> Segment | str:
            recycled = self._recycle(wanted)
            if recycled is not None:
                return recycled
            fresh = self._allocate(wanted, evict=exact, weights=exact)
            if exact or isinstance(fresh, Segment):
                return fresh
            # A larger free segment beats fresh pages that cost other free ones.
            return self._recycle_larger(wanted) or self._allocate(wanted, evict=True)

        return self._wait_for(attempt, wanted)

    def reserve(self, size: int) -> None:
        """Make room for an ordinary file of `size` bytes that is written next. Free segments are
        removed for it. Raises `PoolFull` like `acquire`."""

        def attempt() -> bool | str:
            with self.locked():
                return self._make_room(size, evict=True) or True

        self._wait_for(attempt, size)

    def release(self, path: Path) -> bool:
        """Make a sealed segment free, or remove another file of the pool.

        False while someone has a lease on it (then call again later); True when it is done or was
        before, and for what is no file of ours, which is left alone. Raises `ValueError` for a path
        that is not a sealed file of this pool.
        """
        path = Path(path)
        if path.parent != self.directory or path.name.startswith("."):
            raise ValueError(f"{path} is not a sealed file of {self.directory}")
        if not is_sealed(path.name) or self.own(path.name) is None:
            return True
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        try:
            return self._release_opened(path, descriptor)
        finally:
            os.close(descriptor)

    def trim(self) -> int:
        """Remove the free segments; returns the bytes given back to the system."""
        return sum(size for size, name in self.free() if self._evict(name))

    def sweep_unsealed(self) -> int:
        """Take back what dead writers left; returns how many files."""
        return sum(self._take_back(path) for path in self.dead_writing())

    def remove(self) -> None:
        """Remove everything of this run; readers keep what they have mapped. Files of others stay,
        and with them the directory and its mark."""
        if not self.is_marked():
            return
        for name in self.names():
            if is_sealed(name):
                self.release(self.directory / name)
        self.trim()
        for name in self.names():
            if is_ours(name):
                unlink_own(self.directory / name)
        if set(self.names()) <= {MARK, LIVE}:
            unlink_own(self.directory / LIVE)
            # Whatever could not be removed needs the mark: without it nobody may touch it.
            if self.names() == [MARK]:
                unlink_own(self.directory / MARK)
            with suppress(OSError):
                self.directory.rmdir()

    def _wait_for(self, attempt: Callable[[], _T | str], size: int) -> _T:
        """Repeat `attempt` until it returns something else than a reason, and return that;
        `PoolFull` at the deadline."""
        deadline = time.monotonic() + self.wait_seconds
        pause, next_sweep = _PAUSES[0], 0.0
        while True:
            found = attempt()
            if not isinstance(found, str):
                return found
            now = time.monotonic()
            if now >= next_sweep:
                if size > self._limit(self.held()):
                    raise self._full(size, found)
                next_sweep = now + _SWEEP_SECONDS
                if self.sweep_unsealed():
                    continue
            if now >= deadline:
                raise self._full(size, found)
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, _PAUSES[1])

    def _recycle(self, size: int) -> Segment | None:
        for inode in writable_mappings.of_size(size):
            segment = self._claim(f"{FREE}{size}.{inode}", size)
            if segment is not None:
                return segment
        for name in self.names(f"{FREE}{size}."):
            segment = self._claim(name, size)
            if segment is not None:
                return segment
        return None

    def _recycle_larger(self, size: int) -> Segment | None:
        for larger, name in self.free():
            if size < larger <= 2 * size:
                segment = self._claim(name, larger)
                if segment is not None:
                    return segment
        return None

    def _claim(self, name: str, size: int) -> Segment | None:
        """Take a free segment; None when another process was faster."""
        free = self.own(name)
        if free is None:
            return None
        path, generation = self.new_writing_path()
        try:
            os.rename(free, path)
        except FileNotFoundError:
            return None
        try:
            status = path.lstat()
            if status.st_size != size or not is_whole_segment(status):
                logger.warning("removed %s, which is not a whole segment", name)
                path.unlink(missing_ok=True)
                return None
            mapping = writable_mappings.take(path, status)
        except FileNotFoundError:
            return None  # the directory is being removed
        except BaseException:
            self._take_back(path)
            raise
        return self._segment(path, generation, mapping)

    def _segment(self, path: Path, generation: int, mapping: WritableMapping) -> Segment:
        mapping.populate()
        return Segment(self, path, generation, mapping, self.poison)

    def _allocate(self, size: int, evict: bool, weights: bool = False) -> Segment | str:
        """A new segment, or why there is no room for one."""
        with self.locked():
            full = self._make_room(size, evict, weights)
            if full is not None:
                return full
            path, generation = self.new_writing_path()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            descriptor = os.open(path, flags, SEGMENT_MODE)
            try:
                # From here on it counts; allocating its pages takes long and needs no lock.
                os.ftruncate(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
        try:
            # Writing to a page that a full file system cannot give would be SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            mapping = WritableMapping(descriptor)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                return "the file system is full"
            raise
        finally:
            os.close(descriptor)
        return self._segment(path, generation, mapping)

    def room_for_weights(self) -> int | None:
        """Bytes that published weights can have here, those they have included; None: no limit."""
        available, held = self.available_bytes(), self.held()
        if available is None:
            return None
        free = sum(size for size, _ in self.free() if not held.is_weights(size))
        return available + held.weights + free

    def _limit(self, held: Held) -> int:
        """Bytes that all files but published weights may have together."""
        weights = self.versions * held.version
        return shards_limit(self.max_bytes, file_system_bytes(self.directory), weights)

    def _make_room(self, size: int, evict: bool, weights: bool = False) -> str | None:
        """Make room for `size` more bytes, by removing free segments if allowed to; return the
        reason if they do not fit."""
        held = self.held()
        available, limit = self.available_bytes(), self._limit(held)
        lack = held.others + size - limit
        unset = "" if self.max_bytes is not None else " here, as it is not set,"
        why = f"dispatch.max_bytes is{unset} {limit:,} and {held.others:,} are in use"
        if available is not None and size - available > lack:
            lack = size - available
            why = f"{available:,} bytes are free on the file system"
        if lack <= 0:
            return None
        free = self.free() if evict else []
        if not weights:
            # The next version of the weights needs theirs.
            free = [each for each in free if not held.is_weights(each[0])]
        if sum(each for each, _ in free) < lack:
            return why
        while lack > 0 and free:
            # The smallest that is enough, else the largest.
            chosen = next((item for item in free if item[0] >= lack), free[-1])
            free.remove(chosen)
            lack -= chosen[0] if self._evict(chosen[1]) else 0
        return None if lack <= 0 else why

    def _release_opened(self, path: Path, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        status = os.fstat(descriptor)
        with suppress(FileNotFoundError):
            named = path.lstat()
            if (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
                return True  # another released it first
            if not is_whole_segment(status):
                path.unlink()
            elif self.poison:
                # Filled in state writing: a crash half-way must not leave a poisoned sealed file.
                writing, generation = self.new_writing_path()
                os.rename(path, writing)
                mapping = writable_mappings.take(writing, status)
                Segment(self, writing, generation, mapping, poison=True).abandon()
            else:
                os.rename(path, self.free_path(status))
        return True

    def _evict(self, name: str) -> bool:
        """Remove a free segment and its memory; False when another process was faster."""
        free = self.own(name)
        if free is None:
            return False
        path, _ = self.new_writing_path()
        mapping = None
        try:
            os.rename(free, path)
            with suppress(OSError, ValueError):  # no descriptor left, or an empty file
                mapping = writable_mappings.take(path, path.lstat())
            path.unlink()
        except FileNotFoundError:
            return False
        if mapping is not None:
            # Other processes may keep it mapped while they are idle.
            mapping.discard_pages()
            mapping.close()
        return True

    def _take_back(self, path: Path) -> bool:
        """Make a file in state writing free, or remove it if it is not a whole segment."""
        with suppress(FileNotFoundError):
            status = path.lstat()
            if is_whole_segment(status):
                os.rename(path, self.free_path(status))
            else:
                path.unlink()
            return True
        return False

    def _full(self, size: int, why: str) -> PoolFull:
        paths = [self.directory / name for name in self.names()]
        return PoolFull(
            errno.ENOSPC,
            f"{size:,} bytes do not fit into {self.directory}: {why}. "
            f"{describe_holders(paths)}. Enlarge the shared memory (with Docker: `--shm-size=8g`), "
            "raise dispatch.max_bytes, or run `earl shards sweep`",
        )
