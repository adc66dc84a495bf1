"""One host's part of a read: requests to send, requests in flight, and the answer coming in."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import xxhash

from earl_core.dispatch.remote import protocol
from earl_core.dispatch.remote.sockets import remaining
from earl_core.dispatch.remote.transport import (
    Range,
    RemoteRead,
    TransportError,
    proof_for,
)
from earl_core.dispatch.shards.checksums import Proof
from earl_core.system.frames import WireError

_VECTOR = 64


@dataclass
class Question:
    """One request: some ranges, where their bytes go, and the proofs of their files."""

    ranges: list[Range] = field(default_factory=list)
    into: list[memoryview] = field(default_factory=list)
    proofs: dict[str, Proof] = field(default_factory=dict)
    size: int = 0


def cut(read: RemoteRead, proofs: Mapping[str, Proof], request_bytes: int) -> list[Question]:
    """Cut a read into requests of about `request_bytes`: long ranges divided, short ones joined."""
    found: list[Question] = []
    current = Question()
    for item, view in _pieces(read, request_bytes):
        full = (
            current.size + item.length > request_bytes or len(current.ranges) == protocol.MAX_RANGES
        )
        new_file = item.file not in current.proofs and len(current.proofs) == protocol.MAX_FILES
        if current.ranges and (full or new_file):
            found.append(current)
            current = Question()
        current.ranges.append(item)
        current.into.append(view)
        current.proofs[item.file] = proof_for(item, proofs)
        current.size += item.length
    return [*found, current] if current.ranges else found


def _pieces(read: RemoteRead, most: int) -> Iterable[tuple[Range, memoryview]]:
    for item, place in zip(read.ranges, read.into, strict=True):
        view = place.cast("B")
        for begin in range(0, item.length, most):
            size = min(most, item.length - begin)
            piece = Range(item.file, item.generation, item.start + begin, size)
            yield piece, view[begin : begin + size]


class Peer:
    """A host that is read from. `left`: bytes that have not come yet, in flight ones included."""

    def __init__(self, host: str, questions: list[Question]) -> None:
        self.host = host
        self.queue = deque(questions)
        self.in_flight: deque[tuple[int, Question]] = deque()
        self.left = sum(question.size for question in questions)
        self.connection: socket.socket | None = None
        self.reused = False
        self.broken = False
        self.last = time.monotonic()
        self._number = 0
        self._expect_head()

    @property
    def bytes_in_flight(self) -> int:
        """Bytes asked for and not yet answered in full."""
        return sum(question.size for _, question in self.in_flight)

    def ask(self, deadline: float) -> None:
        """Send the next request. Raises `OSError`."""
        assert self.connection is not None
        question = self.queue.popleft()
        self._number += 1
        if not self.in_flight:
            self.last = time.monotonic()
        self.in_flight.append((self._number, question))
        proofs = list(question.proofs.values())
        message = memoryview(protocol.pack_request(self._number, proofs, question.ranges))
        while message:
            try:
                message = message[self.connection.send(message) :]
            except BlockingIOError:
                select.select([], [self.connection], [], remaining(deadline))

    def rewind(self) -> None:
        """Put what is in flight back into the queue: the connection is a new one."""
        while self.in_flight:
            self.queue.appendleft(self.in_flight.pop()[1])
        self._expect_head()

    def take(self) -> None:
        """Take what has come, without waiting. Raises `TransportError`, `WireError`, `OSError`."""
        assert self.connection is not None
        while True:
            try:
                count = self.connection.recvmsg_into(self._wanted[:_VECTOR])[0]
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("the other side closed it")
            self.last = time.monotonic()
            # An answer on a kept connection shows that it had not ended while idle.
            self.reused = False
            self._advance(count)
            if self._wanted:
                return
            self._complete()
            if not self.in_flight:
                return

    def _advance(self, count: int) -> None:
        done = 0
        while done < len(self._wanted) and count >= self._wanted[done].nbytes:
            count -= self._wanted[done].nbytes
            done += 1
        del self._wanted[:done]
        if count:
            self._wanted[0] = self._wanted[0][count:]

    def _expect_head(self) -> None:
        self._head = bytearray(protocol.RESPONSE.size)
        self._message: bytearray | None = None
        self._answer: tuple[protocol.Status, int] | None = None
        self._wanted: list[memoryview] = [memoryview(self._head)]

    def _complete(self) -> None:
        """A head, or the payload after it, is here in full."""
        if self._answer is not None:
            self._finish(*self._answer)
            return
        number, status, size, checksum = protocol.read_response(self._head)
        if not self.in_flight or number != self.in_flight[0][0]:
            raise WireError("an answer came that was not asked for")
        question = self.in_flight[0][1]
        self._answer = status, checksum
        if status == protocol.Status.OK:
            if size != question.size:
                raise WireError("an answer has another length than what was asked for")
            self._wanted = list(question.into)
            return
        self._message = bytearray(size)
        self._wanted = [memoryview(self._message)] if size else []
        if not size:
            self._finish(status, checksum)

    def _finish(self, status: protocol.Status, checksum: int) -> None:
        question = self.in_flight.popleft()[1]
        if status != protocol.Status.OK:
            raise protocol.failure(bytes(self._message or b""), self.host)
        digest = xxhash.xxh3_64()
        for view in question.into:
            digest.update(view)
        if digest.intdigest() != checksum:
            raise TransportError(f"bytes from host {self.host!r} were damaged on the way")
        self.left -= question.size
        self._expect_head()
