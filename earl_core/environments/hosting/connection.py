"""One end of the connection between an environment pool and a host; both ends are of this class.

Frames are those of `earl_core.system.frames`. To the host:

    start   name, options, timeout_seconds, threads    once, first
    reset   call, episode, [prompt, seed, policy]      answered by "answer" or "failed"
    step    call, episode, [text] as arguments         answered by "answer" or "failed"
    legal   call, episode, [] as arguments             answered by "answer" or "failed"
    close   episode                                    not answered
    stop                                               close all, then exit

From the host:

    ready                                              once, first
    refused why                                        in its place
    answer  call, value                                {messages}, {messages, reward, done, info}
                                                       or {answers}
    failed  call, reason, detail                       after reason "timeout" the host is replaced
    alive                                              now and then, while its event loop turns
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from earl_core.system.frames import FrameBuffer, WireError

logger = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """Sends and receives frames; all methods belong to the running event loop.

    on_message: called with every message. on_lost: called once, when the connection has ended,
    whoever ended it; what sends no frame is cut off.
    """

    def __init__(
        self, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer()
        self._outgoing: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None

    def send(self, frame: bytes) -> None:
        """Sends an encoded message, together with the others of this turn of the event loop."""
        if not self._outgoing:
            self._loop.call_soon(self.flush)
        self._outgoing.append(frame)

    def flush(self) -> None:
        """Sends what waits, now."""
        frames, self._outgoing = self._outgoing, []
        if frames and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def abort(self) -> None:
        """Ends the connection; nothing more is sent or received."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except WireError as error:
            logger.error("the other end sent no frame: %s", error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()
