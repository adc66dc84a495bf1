"""A segment that this process writes: filled in place, then sealed under a name or abandoned.

Writable mappings are cached while others own or read the segments: a mapping whose page tables are
built is written at the speed of memcpy; a fresh one costs a fault per page. Nobody touches a
mapping while its segment is not in state writing in this process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

from earl_core.dispatch.segments.page_lock import PageLock
from earl_core.dispatch.segments.pool_directory import PoolDirectory, is_sealed

POISON = 0xA5


class Segment:
    """A segment in state writing, owned by this process until it is sealed or abandoned. As a
    context manager, it is abandoned at the end unless it was sealed."""

    def __init__(
        self,
        directory: PoolDirectory,
        path: Path,
        generation: int,
        mapping: WritableMapping,
        poison: bool,
    ) -> None:
        self.path = path
        self.size = mapping.size
        self.generation = generation
        self._directory = directory
        self._poison = poison
        self._pid = os.getpid()
        self._mapping: WritableMapping | None = mapping
        self._memory: memoryview | None = memoryview(mapping.memory)

    @property
    def memory(self) -> memoryview:
        """The whole segment, writable uint8; its old content is stale, not zero. Nothing made from
        it may be used for writing after `seal` or `abandon`."""
        if self._memory is None:
            raise ValueError("the segment was sealed or abandoned; acquire another")
        return self._memory

    def page_lock(self) -> bool:
        """Have a GPU write the memory by itself; whether it can. Stays when the segment goes."""
        return self._mapping is not None and self._mapping.page_lock.take()

    def seal(self, name: str) -> Path:
        """Publish the content under `name` and return its path; readers see it at once.

        A name is given once only: put the generation into it. Raises `ValueError` for a name that
        `dispatch.names` does not know, since nobody would remove such a file, for a segment that
        was sealed or abandoned, and in a process that does not own it; `FileExistsError` for a name
        that is taken; `FileNotFoundError` when the file was removed.
        """
        if self._mapping is None:
            raise ValueError("the segment was sealed or abandoned; acquire another")
        if self._pid != os.getpid():
            raise ValueError(
                f"the segment belongs to process {self._pid}; a forked child acquires its own"
            )
        if not is_sealed(name):
            raise ValueError(
                f"a segment cannot be sealed as {name!r}: give a name such as "
                "000012-rollout-0-<generation>.arrow"
            )
        target = self._directory.directory / name
        if os.path.lexists(target):
            raise FileExistsError(
                errno.EEXIST,
                f"{target} exists, and published files are never replaced: put the generation "
                "into the name",
            )
        try:
            os.rename(self.path, target)
        except FileNotFoundError:
            self._end(lost=True)
            raise FileNotFoundError(
                errno.ENOENT,
                f"{self.path} was removed while it was written: the run's shards were swept under "
                "a live process; start the run again",
            ) from None
        self._end(lost=False)
        return target

    def abandon(self) -> None:
        """Give the segment back to the free list; nothing happens once it is sealed or abandoned.
        In a forked child nothing happens either: the segment is the parent's."""
        if self._mapping is None or self._pid != os.getpid():
            return
        if self._poison:
            self._mapping.fill(POISON)
        try:
            os.rename(self.path, self._directory.free_path(os.lstat(self.path)))
        except FileNotFoundError:
            self._end(lost=True)
        else:
            self._end(lost=False)

    def _end(self, lost: bool) -> None:
        mapping, self._mapping, self._memory = self._mapping, None, None
        if mapping is not None and lost:
            mapping.close()
        elif mapping is not None:
            writable_mappings.put_back(mapping)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()


_MAX_IDLE = 64  # mappings, each with one descriptor
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_POPULATE_STEP = 64 * 1024 * 1024  # the interpreter's lock is held this long at most

Inode = tuple[int, int]


class WritableMapping:
    """One segment mapped for writing; `inode` is (device, inode number)."""

    def __init__(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.inode: Inode = (status.st_dev, status.st_ino)
        self.size = status.st_size
        self.memory = mmap.mmap(descriptor, self.size)
        self.page_lock = PageLock(self.memory)
        self._populated = False

    def populate(self) -> None:
        """Build the page tables, once: five times cheaper than a fault for every page."""
        if self._populated:
            return
        self._populated = True
        with contextlib.suppress(OSError):  # an older kernel faults on first touch instead
            for start in range(0, self.size, _POPULATE_STEP):
                step = min(_POPULATE_STEP, self.size - start)
                self.memory.madvise(_POPULATE_WRITE, start, step)

    def fill(self, value: int) -> None:
        """Set every byte."""
        np.frombuffer(self.memory, dtype=np.uint8)[:] = value

    def discard_pages(self) -> None:
        """Give the memory back now, however many idle processes still map the segment. A hole, not
        a truncation: who wrongly looks at it reads zeros and is not killed."""
        self.page_lock.release()  # locked pages would stay
        with contextlib.suppress(OSError):  # not every file system can
            self.memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap; where a stale view is alive, the mapping goes with it."""
        self.page_lock.release()
        with contextlib.suppress(BufferError):
            self.memory.close()


class WritableMappings:
    """Mappings that no segment of this process uses at the moment, least recently used first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Inode, WritableMapping] = OrderedDict()
        self._lock = threading.Lock()

    def of_size(self, size: int) -> list[int]:
        """Inode numbers of the idle mappings of this size, the latest used first."""
        with self._lock:
            return [key[1] for key, each in reversed(self._idle.items()) if each.size == size]

    def take(self, path: Path, status: os.stat_result) -> WritableMapping:
        """The mapping of the segment at `path`, cached or new; give it back or close it."""
        with self._lock:
            mapping = self._idle.pop((status.st_dev, status.st_ino), None)
        if mapping is not None:
            return mapping
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            return WritableMapping(descriptor)
        finally:
            os.close(descriptor)

    def put_back(self, mapping: WritableMapping) -> None:
        """Keep a mapping for the next use of its segment; the oldest one too many is unmapped, and
        so is what others have removed: page-locked, it would keep its memory."""
        with self._lock:
            self._idle[mapping.inode] = mapping
            self._idle.move_to_end(mapping.inode)
            dropped = [self._idle.popitem(last=False)[1]] if len(self._idle) > _MAX_IDLE else []
            locked = {key for key, each in self._idle.items() if each.page_lock.held}
            if locked:
                dropped += [self._idle.pop(key) for key in locked & _nameless()]
        for each in dropped:
            each.close()

    def forget_parent(self) -> None:
        """Start a forked child's own cache, without the lock that a thread may have held."""
        self._lock = threading.Lock()
        self._idle = OrderedDict()


def _nameless() -> set[Inode]:
    """The files that this process maps and that have no name any more."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(" (deleted)"):
            _, _, _, device, inode, *_ = line.split()
            major, minor = (int(part, 16) for part in device.split(":"))
            found.add((os.makedev(major, minor), int(inode)))
    return found


writable_mappings = WritableMappings()
os.register_at_fork(after_in_child=writable_mappings.forget_parent)
