"""The byte streams of a host's ranks at one end of the way between controller and host.

Each end has a socket for every stream of every rank. What one end reads from its sockets it sends
over as pieces, and the other writes them into its own.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_CHUNK = 1 << 18
"""Bytes of a piece at most."""

Piece = tuple[int, str, bytes]
"""Bytes of a stream, after the rank's number and the stream's name; none at all: its end."""


class Streams:
    """One thread collects and one delivers; any may add and remove ranks.

    patience: seconds to wait for a rank to be added whose bytes have come already.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self._patience = patience
        self._ends: dict[int, Mapping[str, socket.socket]] = {}
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ, None)

    def add(self, number: int, ends: Mapping[str, socket.socket]) -> None:
        """A rank's sockets, by the streams' names."""
        with self._changed:
            self._ends[number] = ends
            for name, end in ends.items():
                self._selector.register(end, selectors.EVENT_READ, (number, name))
            self._changed.notify_all()
        self._waker.send(b"\n")

    def remove(self, number: int) -> None:
        """Forget a rank before its sockets are closed, so that their descriptors may be others'."""
        with self._changed:
            for end in self._ends.pop(number, {}).values():
                self._listen_no_more(end)

    def collect(self, seconds: float | None = None) -> list[Piece]:
        """What ranks have written since, as soon as there is anything; nothing after a time."""
        pieces: list[Piece] = []
        for key, _ in self._selector.select(seconds):
            end: Any = key.fileobj
            if key.data is None:
                end.recv(64)
                continue
            data = b""
            with suppress(OSError):
                data = end.recv(_CHUNK)
            if not data:
                self._listen_no_more(end)
            pieces.append((*key.data, data))
        return pieces

    def deliver(self, pieces: Sequence[Piece]) -> None:
        """Write pieces, in their order. Those of a rank that is gone are dropped: its supervisor
        says how it went."""
        for number, name, data in pieces:
            end = self._end(number, name)
            with suppress(OSError):
                if end is not None and data:
                    end.sendall(data)
                elif end is not None:
                    end.shutdown(socket.SHUT_WR)

    def end_all(self) -> None:
        """No more bytes come for any rank."""
        with self._changed:
            for end in (each for ends in self._ends.values() for each in ends.values()):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_WR)

    def _end(self, number: int, name: str) -> socket.socket | None:
        limit = time.monotonic() + self._patience
        with self._changed:
            while number not in self._ends and (left := limit - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._ends.get(number, {}).get(name)

    def _listen_no_more(self, end: socket.socket) -> None:
        # A stream that ends and a rank that is closed may meet.
        with suppress(KeyError, ValueError):
            self._selector.unregister(end)
