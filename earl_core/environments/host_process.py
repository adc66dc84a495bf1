"""The pool's side of one host process: its start, its channel, its signs of life, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from earl_core.environments.base import EnvironmentConfigError
from earl_core.environments.host import alive_interval
from earl_core.environments.wire import FrameReader, WireError, encode, frame
from earl_core.secrets import redact
from earl_core.system.files import private

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_WAIT_SECONDS = 10.0
_EXIT_POLLS = 100
_EXIT_POLL_SECONDS = 0.01
_TAIL_BYTES = 4000


class HostStartError(RuntimeError):
    """A host process did not become ready. killed: by a signal of someone else's."""

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class HostProcess(asyncio.Protocol):
    """One live host. Make it with `HostProcess.start`.

    on_message: called with every message but signs of life. on_lost: called once when the process
    is gone or was killed for its silence, never after `stop` or `abandon`.
    """

    def __init__(
        self,
        timeout_seconds: float,
        on_message: Callable[[list[Any]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._interval = alive_interval(timeout_seconds)
        # The host's own timer fires two intervals after the timeout; this is for when it cannot.
        self._allowed_silence = timeout_seconds + 4 * self._interval + 1.0
        self._silence = 0.0
        self._reader = FrameReader()
        self._outgoing: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Future[None] = self._loop.create_future()
        self._lost = asyncio.Event()
        self._ended = False
        self._log: IO[bytes] | None = None
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.timed_out = False
        """Whether it was lost because it did not answer in time."""

    @classmethod
    async def start(
        cls,
        name: str,
        options: Mapping[str, Any],
        *,
        timeout_seconds: float,
        start_timeout_seconds: float,
        log_path: Path | None,
        on_message: Callable[[list[Any]], None],
        on_lost: Callable[[], None],
    ) -> HostProcess:
        """Starts a host and waits until it has made one environment.

        Raises EnvironmentConfigError when the environment cannot be made, HostStartError when the
        process dies or takes longer than `start_timeout_seconds`.
        """
        host = cls(timeout_seconds, on_message, on_lost)
        try:
            ours = host._spawn(log_path)
            await host._loop.create_unix_connection(lambda: host, sock=ours)
            host.send(["start", name, dict(options), timeout_seconds])
            await asyncio.wait_for(asyncio.shield(host._opening), start_timeout_seconds)
        except TimeoutError:
            tail = await host.abandon()
            raise HostStartError(
                f"The environment {name!r} was not ready after {start_timeout_seconds:g} s. Its "
                f"host's log ends:\n{tail}"
            ) from None
        except HostStartError as error:
            lost = host.lost
            tail = await host.abandon()
            killed = lost and host.killed_from_outside
            raise HostStartError(f"{error} Its log ends:\n{tail}", killed=killed) from None
        except BaseException:
            await host.abandon()
            raise
        host._watch()
        return host

    @property
    def pid(self) -> int:
        """The host's process id, which is also its process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Whether the process is gone or was found silent."""
        return self._lost.is_set()

    def send(self, message: list[Any]) -> None:
        """Sends a message, together with the others of this turn of the event loop."""
        if self._ended or self._lost.is_set():
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(encode(message))

    async def stop(self) -> None:
        """Lets the host close its environments, then ends it."""
        self.send(["stop"])
        self._flush()
        self._ended = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), _STOP_SECONDS)
        await self.abandon()

    async def abandon(self) -> str:
        """Kills the host and all of its process group; returns the end of its log."""
        self._ended = True
        self._outgoing.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if not self._opening.done():
            self._opening.cancel()
        await self._reap()
        tail = self._log_tail()
        if self._log is not None:
            self._log.close()
            self._log = None
        return tail

    @property
    def killed_from_outside(self) -> bool:
        """Whether a signal of someone else's ended it, as opposed to a fault of its own. After
        `abandon`, when it had been lost before."""
        code = None if self._process is None else self._process.returncode
        return code in (-signal.SIGKILL, -signal.SIGTERM) and not self.timed_out

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._silence = 0.0
        try:
            messages = self._reader.feed(data)
        except WireError as error:
            logger.error("a host sent no frame: %s", error)
            self._lose()
            return
        for message in messages:
            kind = message[0]
            if kind == "alive":
                continue
            if kind == "ready":
                if not self._opening.done():
                    self._opening.set_result(None)
            elif kind == "refused":
                if not self._opening.done():
                    self._opening.set_exception(EnvironmentConfigError(message[1]))
            else:
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose()

    def _spawn(self, log_path: Path | None) -> socket.socket:
        if log_path is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the host
        else:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(log_path, "ab+", opener=private)  # noqa: SIM115
        self._log_start = self._log.seek(0, os.SEEK_END)
        ours, theirs = socket.socketpair()
        # -P: the working directory comes last, where `path` has it.
        command = [sys.executable, "-P", "-m", "earl_core.environments.host"]
        command.append(str(theirs.fileno()))
        # The death signal belongs to the thread that starts the process: only the main one lives as
        # long as this process does.
        if threading.current_thread() is threading.main_thread():
            command.append("--die-with-parent")
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # An engine beside it may want this; a user's own scripts may not.
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                # Equal hashes let an environment that iterates over sets be rebuilt.
                env={**inherited, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None:
            self._transport.write(frame(self._outgoing))
            self._outgoing = []

    def _watch(self) -> None:
        # Counts its own turns instead of looking at a clock: when this process was busy, the host's
        # signs of life wait unread and it was not silent.
        self._silence += self._interval
        if self._silence > self._allowed_silence:
            self.timed_out = True
            self._lose()
            return
        self._timer = self._loop.call_later(self._interval, self._watch)

    def _lose(self) -> None:
        if self._lost.is_set():
            return
        self._lost.set()
        if not self._opening.done():
            self._opening.set_exception(HostStartError("The host process died as it started."))
        elif not self._ended:
            self._on_lost()

    async def _reap(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for _ in range(_EXIT_POLLS if self._lost.is_set() and not self.timed_out else 0):
            # It is ending by itself and its status tells why. It is not reaped here, so that its
            # number, which is also its group's, stays taken.
            if os.waitid(os.P_PID, process.pid, flags) is not None:
                break
            await asyncio.sleep(_EXIT_POLL_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            await asyncio.to_thread(process.wait, _WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("host process %d does not end though it was killed", process.pid)

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log_start, end - _TAIL_BYTES))
        tail = self._log.read().decode(errors="replace")
        # The header that faulthandler writes when its timer ends the process.
        if "Timeout (" in tail and not self._ended_by_signal():
            self.timed_out = True
        return redact(tail)

    def _ended_by_signal(self) -> bool:
        return self._process is None or (self._process.returncode or 0) < 0
