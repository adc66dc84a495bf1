"""The byte streams of a host's ranks at one end of the way between controller and host.

Each end has a socket for every stream of every rank. One end sends the bytes that it reads from its
sockets over as pieces, and the other writes them into its own.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_CHUNK = 1 << 18
"""Bytes of a piece at most."""

Piece = tuple[int, str, bytes]
"""Bytes of a stream, after the rank's number and the stream's name; none at all: its end."""

_Stream = tuple[int, str]


class Streams:
    """One thread collects and one delivers; any may add and remove ranks. patience: seconds to wait
    for a rank to be added whose bytes have come already."""

    def __init__(self, patience: float = 0.0) -> None:
        self._patience = patience
        self._ends: dict[int, Mapping[str, socket.socket]] = {}
        self._heard: set[_Stream] = set()
        # What a rank does not take, because it is stopped or busy, holds up no other stream, least
        # of all its supervisor's. A group has one call under way: that bounds it.
        self._waiting: dict[_Stream, deque[bytes]] = {}
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ, None)

    def add(self, number: int, ends: Mapping[str, socket.socket]) -> None:
        """A rank's sockets, by the streams' names."""
        with self._changed:
            self._ends[number] = ends
            for name in ends:
                self._heard.add((number, name))
                self._watch((number, name))
            self._changed.notify_all()
        self._waker.send(b"\n")

    def remove(self, number: int) -> None:
        """Forget a rank before its sockets are closed, so that their descriptors may be others'."""
        with self._changed:
            for name in self._ends.get(number, {}):
                self._heard.discard((number, name))
                self._waiting.pop((number, name), None)
                self._watch((number, name))
            self._ends.pop(number, None)

    def collect(self, seconds: float | None = None) -> list[Piece]:
        """Return the bytes that ranks have written since; nothing after a time, or when only bytes
        for a rank could be passed on."""
        pieces: list[Piece] = []
        for key, events in self._selector.select(seconds):
            end: Any = key.fileobj
            if key.data is None:
                end.recv(64)
                continue
            if events & selectors.EVENT_READ:
                pieces.append((*key.data, self._read(key.data, end)))
            if events & selectors.EVENT_WRITE:
                with self._changed:
                    self._write(key.data)
        return pieces

    def deliver(self, pieces: Sequence[Piece]) -> None:
        """Write pieces, those of a stream in their order. Pieces of a rank that is gone are
        dropped: its supervisor says how it went."""
        for number, name, data in pieces:
            self._wait_for(number)
            with self._changed:
                self._waiting.setdefault((number, name), deque()).append(data)
                self._write((number, name))

    def end_all(self) -> None:
        """End the streams of all ranks: no more bytes come."""
        with self._changed:
            for end in (each for ends in self._ends.values() for each in ends.values()):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_WR)
        self._waker.send(b"\n")

    def _wait_for(self, number: int) -> None:
        limit = time.monotonic() + self._patience
        with self._changed:
            while number not in self._ends and (left := limit - time.monotonic()) > 0:
                self._changed.wait(left)

    def _read(self, stream: _Stream, end: socket.socket) -> bytes:
        data = b""
        with suppress(OSError):
            data = end.recv(_CHUNK)
        if not data:
            with self._changed:
                self._heard.discard(stream)
                self._watch(stream)
        return data

    def _write(self, stream: _Stream) -> None:
        """Write as many of the bytes that wait for a stream as its socket takes."""
        waiting = self._waiting.pop(stream, deque())
        end = self._ends.get(stream[0], {}).get(stream[1])
        # A rank that is gone takes nothing.
        with suppress(OSError):
            while end is not None and waiting:
                data = waiting[0]
                try:
                    taken = end.send(data, socket.MSG_DONTWAIT) if data else 0
                except BlockingIOError:
                    self._waiting[stream] = waiting
                    break
                if not data:
                    end.shutdown(socket.SHUT_WR)
                waiting.popleft()
                if taken < len(data):
                    waiting.appendleft(data[taken:])
        self._watch(stream)

    def _watch(self, stream: _Stream) -> None:
        """Have `collect` look at a stream for what it has to do there, if anything."""
        end = self._ends.get(stream[0], {}).get(stream[1])
        if end is None:
            return
        events = selectors.EVENT_READ if stream in self._heard else 0
        events |= selectors.EVENT_WRITE if stream in self._waiting else 0
        # A stream that ends and a rank that is closed may meet.
        with suppress(KeyError, ValueError):
            self._selector.unregister(end)
        if events:
            with suppress(ValueError):
                self._selector.register(end, events, stream)
