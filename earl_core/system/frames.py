"""The frames that a run's processes exchange: length-prefixed JSON over an inherited socket pair.

Controller and ranks speak it, and so do environment pools and their hosts. A frame is a 4-byte
big-endian length and that many bytes of UTF-8 JSON holding one object. Tensors never cross;
manifests and metrics do. Python's JSON is spoken on both ends, so NaN and infinities survive,
tuples become lists, and keys must be strings.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from earl_core.system.errors import EarlError


class WireError(EarlError, ValueError):
    """A message that cannot cross between processes: too large, not JSON, not of their protocol."""

    expected = False


MESSAGE_LIMIT = 64 * 1024 * 1024
"""Largest message in bytes."""

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 18


def encode(message: dict[str, Any]) -> bytes:
    """Return the frame of a message. Raises `WireError` if it holds something that JSON cannot
    express, or is over `MESSAGE_LIMIT`."""
    try:
        _require_string_keys(message)
        body = json.dumps(message, separators=(",", ":")).encode()
    except WireError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"a message between two processes must be JSON, but {error}: pass numbers, "
            "strings, lists and dictionaries; put arrays into shards and pass their manifest"
        ) from error
    if len(body) > MESSAGE_LIMIT:
        raise WireError(
            f"a message of {len(body):,} bytes is over the limit of {MESSAGE_LIMIT:,} between "
            "two processes: put the data into shards and pass their manifest"
        )
    return _LENGTH.pack(len(body)) + body


def _require_string_keys(value: Any) -> None:
    # json.dumps silently turns keys such as 1 or None into strings, and the other end then sees a
    # different dictionary than was passed.
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise WireError(
                    f"a dictionary passed between two processes has the key {key!r}, but JSON "
                    "knows only string keys: turn the keys into strings, or pass a list"
                )
            _require_string_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, (dict, list, tuple)):
                _require_string_keys(item)


class FrameBuffer:
    """Cuts a byte stream into messages, however the bytes arrive."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Add bytes and yield each message they complete. Raises `WireError` on nonsense."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MESSAGE_LIMIT:
                raise WireError(
                    f"the other end announced a message of {length:,} bytes, over the limit of "
                    f"{MESSAGE_LIMIT:,}: something else wrote into the connection"
                )
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield _decode(body)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise WireError(f"the other end sent something that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(
            f"the other end sent a JSON {type(message).__name__}, but every message is an object"
        )
    return message


class Channel:
    """The rank's blocking end of the wire; any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._frames = FrameBuffer()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message whole. Raises `WireError`, or `OSError` when the other end is gone."""
        frame = encode(message)
        with self._lock:
            self._socket.sendall(frame)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the other end is gone."""
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except OSError:
                return
            if not data:
                return
            yield from self._frames.feed(data)
