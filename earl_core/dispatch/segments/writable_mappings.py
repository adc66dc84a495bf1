"""Writable mappings of segments, cached by this process while others own or read the segments.

A mapping whose page tables are built is written at the speed of memcpy; a fresh one costs a fault
per page. Nobody touches a mapping while its segment is not in state writing in this process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

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
        """Give the memory back now, however many idle processes still map the segment.

        A hole, not a truncation: who wrongly looks at it reads zeros and is not killed.
        """
        with contextlib.suppress(OSError):  # not every file system can
            self.memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap; where a stale view is alive, the mapping goes with it."""
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
        """Keep a mapping for the next use of its segment; the oldest one too many is unmapped."""
        with self._lock:
            self._idle[mapping.inode] = mapping
            self._idle.move_to_end(mapping.inode)
            oldest = self._idle.popitem(last=False)[1] if len(self._idle) > _MAX_IDLE else None
        if oldest is not None:
            oldest.close()

    def forget_parent(self) -> None:
        """In a forked child: its own cache, without the lock that a thread may have held."""
        self._lock = threading.Lock()
        self._idle = OrderedDict()


writable_mappings = WritableMappings()
os.register_at_fork(after_in_child=writable_mappings.forget_parent)
