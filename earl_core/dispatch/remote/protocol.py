"""The range protocol's bytes. Little endian, no pickle, every length bounded before it is read.

    server → client   HELLO     magic, version, server's nonce (32 bytes)
    client → server   ANSWER    magic, client's nonce, HMAC(token, "client", both nonces)
    server → client   WELCOME   status, HMAC(token, "server", both nonces)
    then, any number of times and without waiting for each other:
    client → server   REQUEST   id, ranges of files, the proofs of the files (JSON)
    server → client   RESPONSE  id, status, length, xxh3_64 of the payload; then the payload

The token itself never travels, both sides prove that they know it, and the nonces make a recorded
handshake worthless. The payload of an unsuccessful response is a sentence in UTF-8. Messages are
authenticated but not encrypted: the hosts' network has to be a private one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from pydantic import TypeAdapter

from earl_core.dispatch.remote.transport import Range, TransportError
from earl_core.dispatch.shards.shard import Proof
from earl_core.system.frames import WireError

MAX_VECTOR = 512
"""Buffers given to the kernel in one call; it takes 1,024 at most."""


def tune(connection: socket.socket) -> None:
    """Settings of either side: no delay of small packets, peers that vanished are noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive(
    client: socket.socket,
    into: Sequence[bytearray | memoryview],
    deadline: float,
    stall_seconds: float = math.inf,
) -> bool:
    """Fill the parts one after the other; False when the other side closed first. Raises
    `TimeoutError` at the deadline, or when nothing comes for `stall_seconds`."""
    left = [memoryview(part) for part in into if len(part)]
    while left:
        client.settimeout(min(remaining(deadline), stall_seconds))
        count = client.recvmsg_into(left[:MAX_VECTOR])[0]
        if count == 0:
            return False
        _advance(left, count)
    return True


def send_all(client: socket.socket, parts: Sequence[bytes | memoryview], deadline: float) -> None:
    """Send the parts one after the other, without joining them. Raises `TimeoutError`."""
    left = [memoryview(part) for part in parts]
    while left:
        client.settimeout(remaining(deadline))
        _advance(left, client.sendmsg(left[:MAX_VECTOR]))


def _advance(left: list[memoryview], count: int) -> None:
    """Take the first `count` bytes off."""
    done = 0
    while done < len(left) and count >= left[done].nbytes:
        count -= left[done].nbytes
        done += 1
    # At once: a request may have very many ranges.
    del left[:done]
    if count:
        left[0] = left[0][count:]


def remaining(deadline: float) -> float:
    """Seconds until the deadline. Raises `TimeoutError` when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    return left


_DRAIN_SECONDS = 1.0


def drain(client: socket.socket, size: int) -> None:
    """Read and drop up to `size` bytes before closing. Closing with unread bytes resets the
    connection, and the other side may then never see the answer that was sent before."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        receive(client, [bytearray(min(size, 2**20))], time.monotonic() + _DRAIN_SECONDS)


MAGIC = b"EARLRNG4"
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO = struct.Struct(f"<8s{NONCE_BYTES}s")
ANSWER = struct.Struct(f"<8s{NONCE_BYTES}s{PROOF_BYTES}s")
WELCOME = struct.Struct(f"<8sB{PROOF_BYTES}s")
REQUEST = struct.Struct("<4sIIH")  # mark, id, bytes of the body, ranges
RESPONSE = struct.Struct("<4sIB3xQQ")  # mark, id, status, bytes of the payload, xxh3_64 of it
REQUEST_MARK = b"ERq1"
RESPONSE_MARK = b"ERs1"
MAX_FILES = 256
MAX_RANGES = 1024
MAX_MESSAGE = 2048

# A request's body: the ranges, each with the number of its file, then the files' proofs as JSON.
_RANGE = np.dtype([("file", "<u4"), ("start", "<u8"), ("length", "<u8")])
_PROOFS = TypeAdapter(list[Proof])
MAX_BODY = MAX_FILES * 1024 + MAX_RANGES * _RANGE.itemsize


class Status(IntEnum):
    """The end of a request, or of the handshake."""

    OK = 0
    FAILED = 1


@dataclass(frozen=True)
class Request:
    """A parsed request; `ranges` refer to `proofs` by file name."""

    number: int
    proofs: dict[str, Proof]
    ranges: tuple[Range, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the answer's payload."""
        return sum(item.length for item in self.ranges)


def prove(token: str, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """HMAC-SHA256 that shows knowledge of the token to the holder of either nonce."""
    key = token.encode()
    return hmac.new(key, MAGIC + side + server_nonce + client_nonce, hashlib.sha256).digest()


def same(given: bytes, expected: bytes) -> bool:
    """Tell whether two proofs are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, expected)


def pack_request(number: int, proofs: Sequence[Proof], ranges: Sequence[Range]) -> bytes:
    """A request's bytes; `proofs` are those of exactly the files that `ranges` name."""
    if len(proofs) > MAX_FILES or len(ranges) > MAX_RANGES:
        raise ValueError(f"a request has at most {MAX_FILES} files and {MAX_RANGES} ranges")
    index = {proof.file: place for place, proof in enumerate(proofs)}
    table = np.empty(len(ranges), dtype=_RANGE)
    table["file"] = [index[item.file] for item in ranges]
    table["start"] = [item.start for item in ranges]
    table["length"] = [item.length for item in ranges]
    body = table.tobytes() + _PROOFS.dump_json(list(proofs))
    return REQUEST.pack(REQUEST_MARK, number, len(body), len(ranges)) + body


def read_request_head(head: bytes | bytearray) -> tuple[int, int, int]:
    """(number, bytes of the body, ranges). Raises `WireError`."""
    mark, number, size, ranges = REQUEST.unpack(head)
    if mark != REQUEST_MARK:
        raise WireError("this is no request")
    return number, size, ranges


def read_request(number: int, body: bytearray, ranges: int) -> Request:
    """Parse a request's body. Raises `WireError` when it is none."""
    size = ranges * _RANGE.itemsize
    if size > len(body):
        raise WireError("the request is shorter than its ranges")
    table = np.frombuffer(body, dtype=_RANGE, count=ranges)
    try:
        proofs = _PROOFS.validate_json(body[size:], strict=True)
    except ValueError as error:
        raise WireError("the request does not describe its files") from error
    if len(table) and int(table["file"].max()) >= len(proofs):
        raise WireError("a range names a file that the request does not describe")
    found = tuple(
        Range(proofs[file].file, proofs[file].generation, start, length)
        for file, start, length in table.tolist()
    )
    return Request(number, {proof.file: proof for proof in proofs}, found)


def pack_response(number: int, status: Status, size: int, checksum: int) -> bytes:
    """The head of a response; its payload follows."""
    return RESPONSE.pack(RESPONSE_MARK, number, status, size, checksum)


def pack_failure(number: int, error: BaseException) -> bytes:
    """A whole unsuccessful response. Errors that are not ours tell nothing of the server's."""
    text = str(error) if isinstance(error, TransportError) else "the server failed; see its log"
    payload = text.encode()[:MAX_MESSAGE]
    return pack_response(number, Status.FAILED, len(payload), 0) + payload


def read_response(head: bytes | bytearray) -> tuple[int, Status, int, int]:
    """(number, status, bytes of the payload, checksum). Raises `WireError`."""
    mark, number, status, size, checksum = RESPONSE.unpack(head)
    if mark != RESPONSE_MARK or status > max(Status):
        raise WireError("this is no response")
    if status != Status.OK and size > MAX_MESSAGE:
        raise WireError("an error message of this length is no message")
    return number, Status(status), size, checksum


def failure(message: bytes, host: str) -> TransportError:
    """The error that an unsuccessful response stands for."""
    return TransportError(f"host {host!r}: {message.decode(errors='replace')}")
