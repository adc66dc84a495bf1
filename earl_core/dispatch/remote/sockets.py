"""Sending and receiving with deadlines; what both ends of a connection do alike."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Sequence

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
    """Fill the parts one after the other; False when the other side closed first.

    Raises `TimeoutError` at the deadline, or when nothing comes for `stall_seconds`.
    """
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
    while left and count >= left[0].nbytes:
        count -= left.pop(0).nbytes
    if count:
        left[0] = left[0][count:]


def remaining(deadline: float) -> float:
    """Seconds until the deadline. Raises `TimeoutError` when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    return left


def drain(client: socket.socket, size: int, seconds: float = 1.0) -> None:
    """Read and drop up to `size` bytes before closing.

    Closing with unread bytes resets the connection, and the other side may then never see the
    answer that was sent before.
    """
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        receive(client, [bytearray(min(size, 2**20))], time.monotonic() + seconds)
