"""The pool's side of one host process: its start, its channel, its signs of life, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from earl_core.environments.hosting.connection import Connection
from earl_core.environments.hosting.host import alive_interval
from earl_core.secrets import redact
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.files import private
from earl_core.system.frames import encode
from earl_core.system.storage_errors import naming

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_WAIT_SECONDS = 10.0
_EXIT_POLLS = 100
_EXIT_POLL_SECONDS = 0.01
_DUMP_BYTES = 1 << 16
_TAIL_CHARACTERS = 4000
_IDLE_THREAD = re.compile(
    r'Thread 0x[^\n]*\n  File "[^\n]*/concurrent/futures/thread\.py", line \d+ in _worker\n'
    r"(?:  File [^\n]*\n)*\n?"
)


class HostLost(EarlError):
    """A host process did not become ready. killed: by a signal of someone else's."""

    expected = False

    def __init__(self, message: str = "", *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


@dataclass(frozen=True)
class HostSettings:
    """Settings that the hosts of a pool have in common; see `EnvironmentPool`. threads: of each
    host. program: the command that runs a host, None for this process's Python and packages."""

    name: str
    options: dict[str, Any]
    timeout_seconds: float
    start_timeout_seconds: float
    threads: int
    deterministic: bool
    tools: tuple[str, ...]
    mcp: tuple[dict[str, Any], ...]
    tool_timeout_seconds: float
    log_path: Path | None
    program: tuple[str, ...] | None = None


class HostProcess:
    """One live host. Make it with `HostProcess.start`.

    on_message: called with every answer and failure. on_lost: called once when the process is gone
    or must be replaced, because it is silent or late; never after `stop` or `abandon`.
    """

    def __init__(
        self,
        settings: HostSettings,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._on_message = on_message
        self._on_lost = on_lost
        self._interval = alive_interval(settings.timeout_seconds)
        # The host's own timer fires two intervals after the timeout; this is for when it cannot.
        self._allowed_silence = settings.timeout_seconds + 4 * self._interval + 1.0
        self._silence = 0.0
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(self._take, self._hang_up)
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Future[None] = self._loop.create_future()
        self._lost = asyncio.Event()
        self._hung_up = False
        self._ended = False
        self._ending: asyncio.Future[str] | None = None
        self._log: IO[bytes] | None = None
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.deterministic = True
        """True when a fresh process can play its episodes again."""
        self.wants_policy = False
        """True when its environments ask the policy."""
        self.awaits_reward = False
        """True when its agents post their rewards to the gateway."""
        self.prompt_count = 0
        """Number of prompts after which they come again; 0: it does not say."""
        self.ranges: dict[str, list[float]] = {}
        """As `EnvironmentPool.ranges`."""
        self.concurrent = True
        """True when several of its calls may run at the same time."""
        self.tools: list[dict[str, Any]] = []
        """Schemas of the tools that the model may call."""
        self.notes: list[str] = []
        """Notes for somebody who starts a run with these tools."""
        self.characters = ""
        """All that the environment names."""
        self.versions: dict[str, str] = {}
        """Versions of its Python and the packages there, if they are others than ours."""
        self.timed_out = False
        """True when it was lost because it did not answer in time."""
        self.call_timed_out = False
        """True when it was lost because it reported a call over its deadline."""

    @classmethod
    async def start(
        cls,
        settings: HostSettings,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[], None],
    ) -> HostProcess:
        """Starts a host and waits until it has made one environment.

        Raises ConfigError when the environment cannot be made, HostLost when the
        process dies or takes longer than `settings.start_timeout_seconds`.
        """
        host = cls(settings, on_message, on_lost)
        limit = settings.start_timeout_seconds
        try:
            ours = host._spawn(settings.log_path)
            await host._loop.create_unix_connection(lambda: host._connection, sock=ours)
            own = settings.program is None
            given = vars(settings) | {"log_path": None, "program": None, "own_packages": own}
            host.send({"kind": "start", **given})
            await asyncio.wait_for(asyncio.shield(host._opening), limit)
        except TimeoutError:
            tail = await host.abandon()
            raise HostLost(
                f"the environment {settings.name!r} was not ready after {limit:g} s "
                f"(environment.start_timeout_seconds); its host's log ends:\n{tail}"
            ) from None
        except HostLost as error:
            lost = host.lost
            tail = await host.abandon()
            killed = lost and host.killed_from_outside
            raise HostLost(f"{error}; its log ends:\n{tail}", killed=killed) from None
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
        """True when the process is gone or must be replaced."""
        return self._lost.is_set()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, together with the others of this turn of the event loop."""
        if not self._ended and not self._lost.is_set():
            self._connection.send(encode(message))

    async def stop(self) -> None:
        """Lets the host close its environments, then ends it."""
        self.send({"kind": "stop"})
        self._connection.flush()
        self._ended = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), _STOP_SECONDS)
        await self.abandon()

    async def abandon(self) -> str:
        """Kills the host's process group; returns the end of its log. Once more gives the same."""
        self._ended = True
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        return await asyncio.shield(self._ending)

    async def _end(self) -> str:
        if self._timer is not None:
            self._timer.cancel()
        self._connection.abort()
        if not self._opening.done():
            self._opening.cancel()
        await self._reap()
        tail = self._log_tail()
        if self._log is not None:
            self._log.close()
        return tail

    @property
    def killed_from_outside(self) -> bool:
        """True when a signal of someone else's ended it, as opposed to a fault of its own. After
        `abandon`, when it had been lost before."""
        code = None if self._process is None else self._process.returncode
        return code in (-signal.SIGKILL, -signal.SIGTERM) and not self.timed_out

    def _take(self, message: dict[str, Any]) -> None:
        self._silence = 0.0
        kind = message["kind"]
        if kind == "ready":
            self.deterministic, self.tools = message["deterministic"], message["tools"]
            self.notes = message["notes"]
            self.concurrent, self.characters = message["concurrent"], message["characters"]
            self.wants_policy, self.versions = message["wants_policy"], message["versions"]
            self.awaits_reward = message["awaits_reward"]
            self.prompt_count, self.ranges = message["prompt_count"], message["ranges"]
            if not self._opening.done():
                self._opening.set_result(None)
        elif kind == "refused":
            if not self._opening.done():
                self._opening.set_exception(ConfigError(message["why"]))
        elif kind != "alive":
            self._on_message(message)
            if message.get("stuck"):
                self.call_timed_out = True
                self._lose()

    def _hang_up(self) -> None:
        self._hung_up = True
        self._lose()

    def _spawn(self, log_path: Path | None) -> socket.socket:
        if log_path is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the host
        else:
            with naming(log_path):
                log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log = open(log_path, "ab+", opener=private)  # noqa: SIM115
        self._log_start = self._log.seek(0, os.SEEK_END)
        ours, theirs = socket.socketpair()
        # -P: the working directory comes last, where `path` has it.
        own = (sys.executable, "-P", "-m", "earl_core.environments.hosting.host")
        command = [*(self._settings.program or own), str(theirs.fileno())]
        # The death signal belongs to the thread that starts the process: only the main one lives as
        # long as this process does.
        if threading.current_thread() is threading.main_thread():
            command.append("--die-with-parent")
        # An engine beside it may want the first; a user's own scripts, and another Python, do not.
        dropped = ("PYTHONSAFEPATH", "PYTHONPATH", "PYTHONHOME")
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        if self._settings.program is None:
            path = (entry or os.getcwd() for entry in sys.path)
            inherited["PYTHONPATH"] = os.pathsep.join(path)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                # Equal hashes let an environment that iterates over sets be rebuilt.
                env={**inherited, "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours

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
            self._opening.set_exception(HostLost("the host process died as it started"))
        elif not self._ended:
            self._on_lost()

    async def _reap(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for _ in range(_EXIT_POLLS if self._hung_up else 0):
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
        self._log.seek(max(self._log_start, end - _DUMP_BYTES))
        said = self._log.read().decode(errors="replace")
        # What faulthandler leaves when its timer ends the process.
        if "Timeout (" in said and self._process is not None and self._process.returncode == 1:
            self.timed_out = True
        return redact(_IDLE_THREAD.sub("", said)[-_TAIL_CHARACTERS:])
