"""A segment that this process writes: filled in place, then sealed under a name or abandoned."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from earl_core.dispatch.segments.names import is_sealed
from earl_core.dispatch.segments.pool_directory import PoolDirectory
from earl_core.dispatch.segments.writable_mappings import WritableMapping, writable_mappings

POISON = 0xA5


class Segment:
    """A segment in state writing, owned by this process until it is sealed or abandoned.

    As a context manager it is abandoned at the end unless it was sealed.
    """

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
        """The whole segment, writable uint8; its old content is stale, not zero.

        Nothing made from it may be used for writing after `seal` or `abandon`.
        """
        if self._memory is None:
            raise ValueError("the segment was sealed or abandoned; acquire another")
        return self._memory

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

        In a forked child nothing happens either: the segment is the parent's.
        """
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
