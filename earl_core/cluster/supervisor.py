"""The process between the controller and one rank, which outlives both for long enough to clean up.

It starts the rank, holds one end of a control connection whose other end only the controller holds,
and waits. When the rank ends, the controller asks for it, or the controller is gone in whatever way
(the connection closes, even after SIGKILL), it ends every descendant of the rank and then itself.
It is a child subreaper, and so it stays the ancestor of orphans, so nothing can slip away by losing
a parent. The fork server's end is nothing to it.

It has one thread. It is forked from the fork server, forks the rank, and speaks the frames that
ranks speak: it sends `{"event": "started", "pid"}` and `{"event": "exited", "code",
"out_of_memory"}`, and receives `{"stop": grace_seconds, "dump": bool}`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from earl_core.system.frames import FrameBuffer, encode
from earl_core.system.memory import out_of_memory_counters, out_of_memory_kills_since
from earl_core.system.processes import (
    ENDING_GRACE_SECONDS,
    MARK,
    Process,
    become_subreaper,
    descendants,
    end_processes,
    still,
)

LISTENER = "EARL_RENDEZVOUS_FD"
"""Environment variable of rank 0: the number of the bound socket that it inherited."""

_POLL_SECONDS = 0.5
_DUMP_SECONDS = 0.3
_HEARD = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Supervises one rank."""

    def __init__(
        self, descriptors: Sequence[int], controller: Process | None, mark: str, name: str
    ) -> None:
        """descriptors: the control connection, the rank's channel, and for rank 0 the listener.
        controller: the process at the other end; None: it is gone already."""
        control, channel, *listener = descriptors
        self._control = socket.socket(fileno=control)
        self._controller = controller
        self._frames = FrameBuffer()
        self._grace = ENDING_GRACE_SECONDS
        self._exit_code: int | None = None
        self._memory_kills = out_of_memory_counters()
        self._wake = _wake_on_signals()
        lifeline_read, self._lifeline = os.pipe()
        self._rank = os.fork()
        if self._rank == 0:
            os.environ[MARK] = mark
            if listener:
                os.environ[LISTENER] = str(listener[0])
            self._become_rank(channel, lifeline_read, mark, name)
        for passed_on in (channel, lifeline_read, *listener):
            os.close(passed_on)
        self._send({"event": "started", "pid": self._rank})
        # Until then it waits, so that nothing of it is heard before its pid is known.
        os.write(self._lifeline, b"\n")

    def _become_rank(self, channel_fd: int, lifeline_fd: int, mark: str, name: str) -> None:
        """Do, in the forked process, what `exec` would have done, then run the rank to its end."""
        from earl_core.cluster import rank_process

        signal.set_wakeup_fd(-1)
        for number in _HEARD:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._control.close()
        for unused in (self._lifeline, *self._wake):
            os.close(unused)
        os.read(lifeline_fd, 1)
        # The rank gets a session of its own: what it sends to its process group stays there.
        os.setsid()
        from setproctitle import setproctitle  # not where no ranks are started

        setproctitle(f"earl_core.cluster.rank_process {name}")
        rank_process.main(channel_fd, lifeline_fd, mark)
        sys.exit(0)

    def run(self) -> None:
        """Wait for a reason to end, end everything, and report how the rank ended."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        wake = self._wake[0]
        poll.register(wake, select.POLLIN)
        while True:
            ready = dict(poll.poll(_POLL_SECONDS * 1000))
            if wake in ready:
                received = os.read(wake, 4096)
                if signal.SIGTERM in received:
                    break
            self._reap()
            if self._exit_code is not None:
                self._report_exit()
                break
            if self._control.fileno() in ready and self._must_stop():
                break
            # Should a fork of the controller keep the connection open, this still sees it go.
            if self._controller is None or still(self._controller) is None:
                break
        reported = self._exit_code is not None
        end_processes(lambda: descendants(os.getpid()), self._grace, self._reap)
        if not reported:
            self._report_exit()

    def _must_stop(self) -> bool:
        try:
            data = self._control.recv(65536)
        except OSError:
            data = b""
        for message in self._frames.feed(data):
            self._grace = float(message["stop"])
            if message["dump"]:
                self._dump_stacks()
            return True
        return not data

    def _dump_stacks(self) -> None:
        # The rank writes all threads' stacks to its log on SIGUSR1, from C: also when it is stuck.
        with suppress(ProcessLookupError):
            os.kill(self._rank, signal.SIGUSR1)
            os.kill(self._rank, signal.SIGCONT)
            time.sleep(_DUMP_SECONDS)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._rank:
                    self._exit_code = os.waitstatus_to_exitcode(status)

    def _report_exit(self) -> None:
        killed = self._exit_code == -signal.SIGKILL
        starved = killed and out_of_memory_kills_since(self._memory_kills) > 0
        self._send({"event": "exited", "code": self._exit_code, "out_of_memory": starved})

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self._control.sendall(encode(message))


def _wake_on_signals() -> tuple[int, int]:
    # Handlers, not SIG_IGN: a rank would inherit ignored signals, and with them a deaf engine.
    def nothing(number: int, frame: FrameType | None) -> None:
        pass

    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in _HEARD:
        signal.signal(number, nothing)
    return read, write


def main(descriptors: Sequence[int], controller: Process | None, mark: str, name: str) -> None:
    """Keep one rank until its end; arguments of `Supervisor`. name: for `ps`."""
    from setproctitle import setproctitle  # not where no ranks are started

    setproctitle(f"earl_core.cluster.supervisor {name}")
    become_subreaper()
    Supervisor(descriptors, controller, mark, name).run()
