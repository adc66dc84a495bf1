"""The controller's side of one rank: its connections, and what came over them."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from earl_core.cluster.errors import LogFile
from earl_core.cluster.host import RankProcess
from earl_core.system.frames import FrameBuffer, encode


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank and its children, in bytes, as of its last heartbeat or result.

    `rss_bytes` is the rank's own resident memory, mapped shards included. `tree_bytes` adds up the
    private memory (neither file nor shared memory) of the rank and all its children, and
    `tree_peak_bytes` is the most seen of that since the current or last call began, sampled four
    times a second.
    """

    rss_bytes: int = 0
    tree_bytes: int = 0
    tree_peak_bytes: int = 0


class RankHandle:
    """A rank's state; the group's monitor thread keeps it up to date.

    `exit_code` is negative for a signal and None while the rank runs. `supervised` turns False when
    the supervisor is gone: either all is ended (`exit_code` is known), or it was killed and its
    host has to end the rank (`RankProcess.end`).
    """

    def __init__(
        self, rank: int, process: RankProcess, log: LogFile, send_timeout_seconds: float
    ) -> None:
        self.rank = rank
        self.process = process
        self.log = log
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.out_of_memory = False
        self.supervised = True
        self.last_sign = time.monotonic()
        self.memory = MemoryUse()
        self.reply: dict[str, Any] | None = None
        self.replied_at = 0.0
        self.frames = FrameBuffer()
        self.events = FrameBuffer()
        # For sends: what is read has arrived already.
        process.channel.settimeout(send_timeout_seconds)

    def send(self, frame: bytes) -> bool:
        """Send a frame to the rank; False if it took nothing for the send timeout.

        A rank that is gone is no error here: its supervisor reports how it went.
        """
        try:
            self.process.channel.sendall(frame)
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def end(self, grace_seconds: float, dump: bool = False) -> None:
        """Ask the supervisor to end everything; with `dump` the rank first logs its stacks."""
        with suppress(OSError):
            self.process.control.sendall(encode({"stop": grace_seconds, "dump": dump}))
