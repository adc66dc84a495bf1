"""Parts: segments with what a host received from other hosts, shared by all its ranks.

The bytes that come in for one plan are cut into parts. Whoever needs a part and finds nobody at it
receives it; the others wait and then map it, so that every byte crosses the network once per host.
A claim is a lock on one byte of a file: it goes with its process, so that after a SIGKILL the next
one who waits takes over. A part is released when all ranks of the host that need it are done with
it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from earl_core.dispatch.remote.incoming import ALIGNMENT, Incoming
from earl_core.dispatch.remote.transport import TransportError
from earl_core.dispatch.segments.leases import Mapped, ShardMismatch, map_shared
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.dispatch.segments.pool_directory import FETCH_LOCK, unlink_own
from earl_core.dispatch.segments.segment import Segment
from earl_core.system.files import lock_bytes, unlock_bytes

_PAUSES = (0.0005, 0.02)  # seconds between looks at a part that another rank receives


@dataclass(frozen=True)
class Part:
    """Ranges `first:last` of what comes in. base, size: bytes, in the receive buffer's places."""

    number: int
    first: int
    last: int
    base: int
    size: int


def cut_parts(incoming: Incoming, most: int) -> list[Part]:
    """Cut what comes in into parts of about `most` bytes; a range is never divided."""
    found: list[Part] = []
    first = 0
    places, ends = incoming.place, incoming.place + incoming.length
    while first < len(incoming):
        base = int(places[first]) // ALIGNMENT * ALIGNMENT
        last = max(first + 1, int(np.searchsorted(ends, base + most, "right")))
        found.append(Part(len(found), first, last, base, int(ends[last - 1]) - base))
        first = last
    return found


class PartStore:
    """The parts of one plan on this host. digest: of both. users: the ranks that need each part."""

    def __init__(
        self, pool: SegmentPool, digest: str, parts: Sequence[Part], users: Sequence[set[int]]
    ) -> None:
        self._pool = pool
        self._digest = digest
        self._parts = parts
        self._users = users

    def path(self, part: Part) -> Path:
        """Return the path of a part once it is here."""
        return self._pool.directory / f"fetch-{self._digest}-{part.number}.part"

    def obtain(
        self,
        needed: Sequence[Part],
        rank: int,
        receive: Callable[[Part, Segment], None],
        wait_seconds: float,
    ) -> dict[int, Mapped]:
        """Lease the parts, by number, after receiving those that nobody else does.

        Raises `TransportError` when another rank does not finish in time; what `receive` raises.
        """
        unlink_own(self._mark(rank))
        found: dict[int, Mapped] = {}
        deadline = time.monotonic() + wait_seconds
        pause = _PAUSES[0]
        while len(found) < len(needed):
            before = len(found)
            for part in needed:
                mapped = None if part.number in found else self._one(part, receive)
                if mapped is not None:
                    found[part.number] = mapped
            if len(found) > before:
                pause = _PAUSES[0]
            elif time.monotonic() > deadline:
                missing = [part.number for part in needed if part.number not in found]
                raise TransportError(
                    f"another rank of this host receives the parts {missing} of a plan and did "
                    f"not finish within {wait_seconds:.0f} s: see whether it hangs"
                )
            else:
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])
        return found

    def _one(self, part: Part, receive: Callable[[Part, Segment], None]) -> Mapped | None:
        """A lease on the part; None while another process receives it."""
        mapped = self._map(part)
        if mapped is not None:
            return mapped
        with self._claimed(part) as mine:
            if not mine:
                return None
            # It may have come between the look and the claim.
            if not self.path(part).exists():
                with self._pool.acquire(part.size) as segment:
                    receive(part, segment)
                    segment.seal(self.path(part).name)
            return self._map(part)

    def _map(self, part: Part) -> Mapped | None:
        path = self.path(part)
        try:
            return map_shared(path, path.stat().st_size)
        except (FileNotFoundError, ShardMismatch):
            return None

    @contextmanager
    def _claimed(self, part: Part) -> Iterator[bool]:
        """Claim the part; true when this process may receive it now. Threads exclude each other
        too."""
        self._pool.make()
        path = self._pool.directory / FETCH_LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
        byte = xxhash.xxh3_64_intdigest(self.path(part).name.encode()) >> 2
        try:
            yield lock_bytes(descriptor, byte, 1)
        finally:
            # Said, not left to closing: a child forked meanwhile has the descriptor too.
            unlock_bytes(descriptor, byte, 1)
            os.close(descriptor)

    def done(self, rank: int) -> None:
        """Note that a rank needs its parts no more, and release those that nobody needs."""
        self._mark(rank).touch(mode=0o600)
        everyone = set().union(*self._users)
        finished = {each for each in everyone if self._mark(each).exists()}
        left = [
            part
            for part, users in zip(self._parts, self._users, strict=True)
            if not users <= finished or not self._pool.release(self.path(part))
        ]
        if not left:
            for each in everyone:
                unlink_own(self._mark(each))

    def _mark(self, rank: int) -> Path:
        return self._pool.directory / f".fetch-{self._digest}.{rank}.done"
