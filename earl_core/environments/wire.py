"""Messages between the environment pool and its hosts: length-prefixed JSON, no pickle.

A frame is four bytes of length, big-endian, and a JSON array of messages; a message is an array
that begins with its kind. To the host:

    ["start", name, options, timeout_seconds]         once, first
    ["reset", call, episode, prompt, seed]            answered by "messages" or "failed"
    ["step", call, episode, text]                     answered by "result" or "failed"
    ["close", call, episode]                          not answered
    ["stop"]                                          close all, then exit

From the host:

    ["ready"] or ["refused", why]                     once, first
    ["messages", call, messages]
    ["result", call, messages, reward, done, info]
    ["failed", call, reason, detail]
    ["alive"]                                         now and then, while its main thread runs
    ["stuck", why]                                    asks to be replaced by a fresh host
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

MAX_FRAME_BYTES = 256 * 2**20

_LENGTH = struct.Struct(">I")


class WireError(RuntimeError):
    """The other side sent something that is no frame."""


def encode(message: Sequence[Any]) -> bytes:
    """One message as JSON. Raises TypeError or ValueError for what is no JSON, NaN included."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def frame(messages: Sequence[bytes]) -> bytes:
    """One frame of encoded messages."""
    body = b"[" + b",".join(messages) + b"]"
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"A frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}.")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Turns received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """The messages of all frames that `data` completes. Raises WireError."""
        buffer = self._buffer
        buffer += data
        messages: list[list[Any]] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise WireError(
                    f"A frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}."
                )
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                messages += json.loads(buffer[start + _LENGTH.size : end])
            except ValueError as error:
                raise WireError(f"A frame is no JSON: {error}.") from error
            start = end
        del buffer[:start]
        return messages
