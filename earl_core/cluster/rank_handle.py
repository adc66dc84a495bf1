"""The controller's side of one rank: its supervisor, its connections, what came over them."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from earl_core.cluster.errors import LogFile
from earl_core.cluster.fork_server import fork_server
from earl_core.system.files import private
from earl_core.system.frames import FrameBuffer, encode
from earl_core.system.import_path import child_path
from earl_core.system.processes import Process, inspect, marked, still


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
    """Spawns a rank and holds its state; the group's monitor thread keeps it up to date.

    `exit_code` is negative for a signal and None while the rank runs. `supervised` turns False when
    the supervisor is gone: either all is ended (`exit_code` is known), or it was killed and the
    processes carrying `mark` have to be ended from here.
    """

    def __init__(
        self,
        rank: int,
        module: str,
        log: LogFile,
        environment: Mapping[str, str],
        send_timeout_seconds: float,
        listener: socket.socket,
    ) -> None:
        """module: of the target. listener: which rank 0 gets.

        Raises `ConnectionError` without the fork server.
        """
        self.rank = rank
        self.log = log
        self.mark = uuid.uuid4().hex
        self.process: Process | None = None
        self.exit_code: int | None = None
        self.out_of_memory = False
        self.supervised = True
        self.last_sign = time.monotonic()
        self.memory = MemoryUse()
        self.reply: dict[str, Any] | None = None
        self.replied_at = 0.0
        self.frames = FrameBuffer()
        self.events = FrameBuffer()
        self.control, control_child = socket.socketpair()
        self.channel, channel_child = socket.socketpair()
        # For sends: what is read has arrived already.
        self.channel.settimeout(send_timeout_seconds)
        given = {**environment, "PYTHONPATH": child_path(environment)}
        try:
            with open(log.path, "ab", opener=private) as output:
                descriptors = [output.fileno(), control_child.fileno(), channel_child.fileno()]
                if rank == 0:
                    descriptors.append(listener.fileno())
                arguments = [self.mark, log.path.stem]
                self.supervisor = fork_server().start(module, arguments, given, descriptors)
        except BaseException:
            self.close()
            raise
        finally:
            control_child.close()
            channel_child.close()

    def started(self, pid: int) -> None:
        """The supervisor has forked the rank."""
        self.process = inspect(pid)

    def send(self, frame: bytes) -> bool:
        """Send a frame to the rank; False if it took nothing for the send timeout.

        A rank that is gone is no error here: its supervisor reports how it went.
        """
        try:
            self.channel.sendall(frame)
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def end(self, grace_seconds: float, dump: bool = False) -> None:
        """Ask the supervisor to end everything; with `dump` the rank first logs its stacks."""
        with suppress(OSError):
            self.control.sendall(encode({"stop": grace_seconds, "dump": dump}))

    def remains(self) -> list[Process]:
        """What lives of the rank without its supervisor: itself, and what carries its mark."""
        own = None if self.process is None else still(self.process)
        return [*([] if own is None else [own]), *marked(self.mark)]

    def close(self) -> None:
        self.control.close()
        self.channel.close()
