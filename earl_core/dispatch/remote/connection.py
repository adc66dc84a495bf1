"""A connection to the range server of another host, over which its bytes are asked for."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash

from earl_core.dispatch.remote import protocol
from earl_core.dispatch.remote.protocol import receive, remaining, send_all, tune
from earl_core.dispatch.remote.transport import Range, RemoteRead, TransportError, proof_for
from earl_core.dispatch.shards.shard import Proof
from earl_core.system.frames import WireError


def _full(host: str, what: str) -> TransportError:
    return TransportError(f"host {host!r} {what}: it may be full", payload={"full": True})


class Connection:
    """An open connection; both ends have shown that they know the token.

    asked: questions that the host has not answered yet, in the order in which it will.
    stall_seconds: how long the host may send nothing while it owes bytes. Whatever goes wrong is a
    `TransportError`; the connection is then out of step and has to be closed. Its payload
    has `full` where the host may have room for one more connection a moment later.
    """

    def __init__(
        self, host: str, address: tuple[str, int], token: str, deadline: float, stall_seconds: float
    ) -> None:
        self.host = host
        self.asked: deque[Question] = deque()
        self._answered = 0
        self._stall_seconds = stall_seconds
        try:
            self._socket = socket.create_connection(address, timeout=remaining(deadline))
        except TimeoutError as error:
            raise TransportError(f"host {host!r} at {address} did not answer in time") from error
        except OSError as error:
            raise TransportError(
                f"host {host!r} at {address} cannot be reached: {error}"
            ) from error
        try:
            with self._errors():
                tune(self._socket)
                try:
                    self._shake_hands(token, deadline)
                except ConnectionError as error:
                    raise _full(host, f"broke the handshake off, {error}") from error
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, token: str, deadline: float) -> None:
        host = self.host
        hello, welcome = bytearray(protocol.HELLO.size), bytearray(protocol.WELCOME.size)
        if not receive(self._socket, [hello], deadline):
            raise _full(host, "closed the connection at once")
        magic, theirs = protocol.HELLO.unpack(hello)
        if magic != protocol.MAGIC:
            raise TransportError(
                f"what listens on host {host!r} is no range server of this version"
            )
        mine = secrets.token_bytes(protocol.NONCE_BYTES)
        proof = protocol.prove(token, b"client", theirs, mine)
        send_all(self._socket, [protocol.ANSWER.pack(protocol.MAGIC, mine, proof)], deadline)
        if not receive(self._socket, [welcome], deadline):
            raise _full(host, "broke the handshake off")
        _, status, shown = protocol.WELCOME.unpack(welcome)
        if status != protocol.Status.OK:
            raise TransportError(
                f"host {host!r} does not accept the token: all hosts need the same one"
            )
        if not protocol.same(shown, protocol.prove(token, b"server", theirs, mine)):
            raise TransportError(
                f"what answers for host {host!r} does not know the token; not trusted"
            )

    def is_alive(self) -> bool:
        """True when the host has not ended the connection while nothing was asked."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # it ended, or bytes came that nobody asked for

    def ask(self, question: Question, deadline: float) -> None:
        """Send a question, without waiting for its answer."""
        self.asked.append(question)
        number, proofs = self._answered + len(self.asked), list(question.proofs.values())
        with self._errors():
            request = protocol.pack_request(number, proofs, question.ranges)
            send_all(self._socket, [request], deadline)

    def take_answer(self, deadline: float) -> Question:
        """Receive what the oldest question asked for; returns that question."""
        with self._errors():
            self._take(self.asked[0], deadline)
        self._answered += 1
        return self.asked.popleft()

    def _take(self, question: Question, deadline: float) -> None:
        head = bytearray(protocol.RESPONSE.size)
        self._receive([head], deadline)
        number, status, size, checksum = protocol.read_response(head)
        if number != self._answered + 1:
            raise WireError("an answer came that was not asked for")
        if status != protocol.Status.OK:
            message = bytearray(size)
            self._receive([message], deadline)
            raise protocol.failure(bytes(message), self.host)
        if size != question.size:
            raise WireError("an answer has another length than what was asked for")
        self._receive(question.into, deadline)
        digest = xxhash.xxh3_64()
        for view in question.into:
            digest.update(view)
        if digest.intdigest() != checksum:
            raise TransportError(f"bytes from host {self.host!r} were damaged on the way")

    def _receive(self, into: Sequence[bytearray | memoryview], deadline: float) -> None:
        if not receive(self._socket, into, deadline, self._stall_seconds):
            raise ConnectionResetError("the other side closed it")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            owed = sum(question.size for question in self.asked)
            raise TransportError(
                f"what host {self.host!r} owes ({owed:,} bytes asked for) did not come in time: "
                "see whether it is alive and its network is not overloaded"
            ) from error
        except WireError as error:
            raise TransportError(
                f"host {self.host!r} does not speak this protocol: {error}"
            ) from error
        except OSError as error:
            raise TransportError(
                f"the connection to host {self.host!r} broke off ({error}): see whether its "
                "process still runs"
            ) from error

    def close(self) -> None:
        """Close it."""
        # Shutting down ends it even where a forked child still holds a copy.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """Close this copy in a forked child, and leave the parent's connection alone."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())


@dataclass
class Question:
    """One request: some ranges, where their bytes go, and the proofs of their files."""

    ranges: list[Range] = field(default_factory=list)
    into: list[memoryview] = field(default_factory=list)
    proofs: dict[str, Proof] = field(default_factory=dict)
    size: int = 0


def cut(read: RemoteRead, proofs: Mapping[str, Proof], request_bytes: int) -> deque[Question]:
    """Cut a read into requests of about `request_bytes`: long ranges divided, short ones joined."""
    found: deque[Question] = deque()
    for item, view in _pieces(read, request_bytes):
        if not found or not _has_room(found[-1], item, request_bytes):
            found.append(Question())
        current = found[-1]
        current.ranges.append(item)
        current.into.append(view)
        current.proofs[item.file] = proof_for(item, proofs)
        current.size += item.length
    return found


def _has_room(question: Question, item: Range, request_bytes: int) -> bool:
    return (
        question.size + item.length <= request_bytes
        and len(question.ranges) < protocol.MAX_RANGES
        and (item.file in question.proofs or len(question.proofs) < protocol.MAX_FILES)
    )


def _pieces(read: RemoteRead, most: int) -> Iterable[tuple[Range, memoryview]]:
    for item, place in zip(read.ranges, read.into, strict=True):
        view = place.cast("B")
        for begin in range(0, item.length, most):
            size = min(most, item.length - begin)
            piece = Range(item.file, item.generation, item.start + begin, size)
            yield piece, view[begin : begin + size]
