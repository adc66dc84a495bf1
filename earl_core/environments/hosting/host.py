"""A host process: runs environments for an `EnvironmentPool` in an event loop and a few threads.

Started as `python -m earl_core.environments.hosting.host FD`, FD being its end of a socket pair. It
dies when that socket closes, which the kernel does for a dead pool, and takes its own children
along. A coroutine over its deadline is cancelled; any other call is reported, and the pool then
replaces the process. While code holds the event loop or the interpreter lock nobody here can notice
anything, so a timer of `faulthandler`, which needs neither, then writes all stacks to the log and
ends the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from importlib import metadata
from typing import Any

from earl_core.environments import registry
from earl_core.environments.hosting.connection import Connection
from earl_core.environments.hosting.host_calls import Call, Calls, failure
from earl_core.environments.tools.episode_tools import HostTools
from earl_core.secrets import guard_output, redact
from earl_core.system.errors import ConfigError
from earl_core.system.frames import Channel, encode

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 3.0
_SHOWN_SHARE = 0.75
"""Share of the time that a start may take, after which the stacks are written to the log."""


def alive_interval(timeout_seconds: float) -> float:
    """Seconds between two signs of life of a host whose calls may take `timeout_seconds`."""
    return min(1.0, timeout_seconds / 4)


class Host:
    """Takes calls, each in a task of its own, and watches how long they run.

    timeout_seconds: deadline of a call, counted from its beginning. threads: most of them that run
    synchronous calls. concurrent: whether two calls may run at the same time.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        timeout_seconds: float,
        threads: int,
        tools: HostTools,
        concurrent: bool,
    ) -> None:
        self._timeout = timeout_seconds
        self._threads = ThreadPoolExecutor(threads, "environment")
        self._calls = Calls(partial(registry.create, name, options), self._threads, tools)
        self._turn: AbstractAsyncContextManager[Any] = nullcontext()
        if not concurrent:
            self._turn = asyncio.Lock()
        self._open: dict[Call, asyncio.Task[None]] = {}
        self._latest: dict[int, Call] = {}
        self._held: frozenset[int] = frozenset()

    async def serve(self, connection: socket.socket) -> None:
        """Runs until the pool says stop or is gone."""
        loop = asyncio.get_running_loop()
        # What environments give to `asyncio.to_thread` is bounded too.
        loop.set_default_executor(self._threads)
        self._over = asyncio.Event()
        self._connection = Connection(self._take, self._over.set)
        await loop.create_unix_connection(lambda: self._connection, sock=connection)
        watch = asyncio.create_task(self._watch())
        await self._over.wait()
        watch.cancel()

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "stop":
            self._stopping = asyncio.create_task(self._stop())
        elif message["kind"] == "hold":
            self._held = frozenset(message["episodes"])
        else:
            self._begin(Call(**message))

    def _begin(self, call: Call) -> None:
        before = self._latest.get(call.episode)
        # Only a close comes before the answer: the pool no longer wants it.
        if before is not None and before.cancellable:
            self._open[before].cancel()
        self._latest[call.episode] = call
        self._open[call] = asyncio.create_task(self._run(call, before))

    async def _run(self, call: Call, before: Call | None) -> None:
        try:
            if before in self._open:
                await asyncio.wait({self._open[before]})
            async with self._turn:
                reply = await self._calls.run(call)
            if reply is not None:
                self._connection.send(reply)
        finally:
            del self._open[call]
            if self._latest[call.episode] is call:
                del self._latest[call.episode]

    async def _watch(self) -> None:
        """Gives signs of life, and reports calls that are over their deadline."""
        # It counts its own turns instead of looking at a clock, because where one call keeps the
        # event loop the others must not age.
        interval = alive_interval(self._timeout)
        while True:
            faulthandler.dump_traceback_later(self._timeout + 2 * interval, exit=True)
            self._connection.send(encode({"kind": "alive"}))
            await asyncio.sleep(interval)
            for call in self._open:
                if not call.running or call.episode in self._held:
                    continue
                call.seconds += interval
                if call.seconds < self._timeout + interval:
                    continue
                late = f"{call.kind} took over {self._timeout:g} s"
                if call.cancellable and not call.overdue:
                    call.overdue = late
                    self._open[call].cancel()
                    continue
                detail = f"{late}, at:\n{call.stack()}"
                self._connection.send(failure(call, "timeout", detail, stuck=True))

    async def _stop(self) -> None:
        for episode in self._calls.episodes():
            self._begin(Call("close", episode))
        if self._open:
            await asyncio.wait(self._open.values(), timeout=_STOP_SECONDS)
        self._over.set()


def _serve(connection: socket.socket) -> None:
    channel = Channel(connection)
    # The pool says no more until it has an answer.
    start = next(channel.messages(), None)
    if start is None:
        return
    name, options = start["name"], start["options"]
    loop = asyncio.new_event_loop()
    # The log tells where it stood, should it take too long.
    faulthandler.dump_traceback_later(_SHOWN_SHARE * start["start_timeout_seconds"])
    try:
        made = registry.check(name, options)
        characters = registry.characters_of(made, name)
        ranges = registry.declared_ranges(made, name)
        given, seconds = (start["tools"], start["mcp"]), start["tool_timeout_seconds"]
        tools = loop.run_until_complete(registry.host_tools(*given, seconds))
        offered = tools.offered(made)
        _check_time(made, start["timeout_seconds"])
    except BaseException as error:
        why = str(error)
        if not isinstance(error, ConfigError):
            why = f"the environment {name!r} cannot be made: {type(error).__name__}: {error}"
        channel.send({"kind": "refused", "why": redact(why)})
        return
    concurrent = bool(getattr(made, "concurrent", True))
    wants_policy = bool(getattr(made, "wants_policy", False))
    channel.send(
        {
            "kind": "ready",
            "deterministic": registry.can_replay(made, start["deterministic"], start["mcp"]),
            "concurrent": concurrent,
            "wants_policy": wants_policy,
            "awaits_reward": bool(getattr(made, "awaits_reward", False)),
            "prompt_count": registry.prompt_count(made),
            "ranges": ranges,
            "tools": offered.schemas,
            "notes": offered.notes,
            "characters": characters,
            # A look at all packages takes as long as the rest of the start.
            "versions": {} if start["own_packages"] else _versions(),
        }
    )
    connection.setblocking(False)
    host = Host(name, options, start["timeout_seconds"], start["threads"], tools, concurrent)
    loop.run_until_complete(host.serve(connection))


def _check_time(made: Any, seconds: float) -> None:
    """Raise `ConfigError` where an episode would be ended before its own limits end it."""
    longest = getattr(made, "longest_seconds", 0.0)
    if longest > seconds:
        raise ConfigError(
            f"an episode may take {longest:g} s by the limits of its tasks, and is ended after "
            f"{seconds:g} s",
            remedy=f"set environment.episode_timeout_seconds to {longest:g} or more, or the option "
            "timeout_multiplier to less",
        )


def _versions() -> dict[str, str]:
    packages = {str(each.metadata["Name"]): each.version for each in metadata.distributions()}
    return {"python": sys.version.split()[0], **dict(sorted(packages.items()))}


def main(arguments: list[str]) -> None:
    """Serves the pool at the other end of descriptor `arguments[0]`."""
    if "--die-with-parent" in arguments:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    )
    guard_output()
    connection = socket.socket(fileno=int(arguments[0]))
    connection.set_inheritable(False)
    try:
        _serve(connection)
    except ConnectionError:
        logging.getLogger(__name__).info("the pool is gone")
    except Exception:
        logging.getLogger(__name__).exception("the host fails")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.close()
        # Threads may hang and environments may have children: nothing of this group may stay.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
