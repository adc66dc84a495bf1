"""Keeps environments in this process and its event loop, so that a debugger stops in their code.

It offers the part of a `HostSupervisor` that a pool uses. There are no deadlines, and code that
ends the process or keeps the loop does so.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from bdb import BdbQuit
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from earl_core.environments import registry
from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.host_calls import Call, Calls
from earl_core.environments.hosting.host_process import HostSettings
from earl_core.system.frames import FrameBuffer

_CLOSE_SECONDS = 5.0


class _DebuggerLeft(BaseException):
    """Somebody left the debugger by `q`, or pressed Ctrl-C: no failure of the environment."""


_LEAVING = (BdbQuit, KeyboardInterrupt)


class _InProcessCalls(Calls):
    """Calls functions where `Calls` has threads for them, unless they ask the policy: then the
    event loop, which answers them, must go on."""

    in_threads = False
    passing = (_DebuggerLeft,)

    async def _invoke(self, call: Call, method: Callable[..., Any], *arguments: Any) -> Any:
        if self.in_threads:
            return await super()._invoke(call, method, *arguments)
        try:
            result = method(*arguments)
            return await result if inspect.isawaitable(result) else result
        except _LEAVING as left:
            raise _DebuggerLeft from left

    async def _in_thread(self, call: Call, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.in_threads:
            return await super()._in_thread(call, function, *arguments)
        try:
            return function(*arguments)
        except _LEAVING as left:
            raise _DebuggerLeft from left


class InProcessSupervisor:
    """A `HostSupervisor` of environments in this process, shaped as a `HostProcess`."""

    pid = None
    restarts = 0
    versions: dict[str, str] = {}  # noqa: RUF012  (it stays empty)

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._open: dict[int, bool] = {}
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[Any]] = set()
        self._turn: AbstractAsyncContextManager[Any] = nullcontext()
        self.characters = ""
        self.deterministic = self.concurrent = True
        self.wants_policy = self.awaits_reward = False
        self.prompt_count = 0
        self.ranges: dict[str, list[float]] = {}
        self.tools: list[dict[str, Any]] = []
        self.notes: list[str] = []

    @property
    def process(self) -> InProcessSupervisor:
        """This object, which has the properties of its environments as a host process has."""
        return self

    def __len__(self) -> int:
        return len(self._open)

    async def start(self) -> None:
        """Make one environment, for what it says of itself. Raises what its code raises."""
        settings = self._settings
        made: Any = registry.create(settings.name, settings.options)
        closing = made.close()
        if inspect.isawaitable(closing):
            await closing
        self.characters = registry.characters_of(made, settings.name)
        self.concurrent = bool(getattr(made, "concurrent", True))
        self.wants_policy = bool(getattr(made, "wants_policy", False))
        self.awaits_reward = bool(getattr(made, "awaits_reward", False))
        self.prompt_count = registry.prompt_count(made)
        self.ranges = registry.declared_ranges(made, settings.name)
        self.deterministic = registry.can_replay(made, settings.deterministic, settings.mcp)
        tools = await registry.host_tools(
            settings.tools, settings.mcp, settings.tool_timeout_seconds
        )
        offered = tools.offered(made)
        self.tools, self.notes = offered.schemas, offered.notes
        if not self.concurrent:
            self._turn = asyncio.Lock()
        self._threads = ThreadPoolExecutor(settings.threads, "environment")
        create = partial(registry.create, settings.name, settings.options)
        self._calls = _InProcessCalls(create, self._threads, tools)
        self._calls.in_threads = self.wants_policy

    async def stop(self) -> None:
        """Close what is open; a thread that waits for a policy that has gone is left behind."""
        for episode in list(self._open):
            self.close(episode)
        closing = asyncio.gather(*self._closing, return_exceptions=True)
        await asyncio.wait([closing], timeout=_CLOSE_SECONDS)
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=False)

    async def call(self, episode_id: int, kind: str, arguments: list[Any]) -> dict[str, Any]:
        """Run the call in this process, as `HostSupervisor` wants. Raises `KeyboardInterrupt` for
        Ctrl-C, and when the debugger is left by `q`."""
        if kind == "reset":
            self._open[episode_id] = False
        elif self._open.get(episode_id, True):
            raise ValueError(f"episode {episode_id} is over: begin it with a reset")
        call = Call(kind, episode_id, next(self._numbers), arguments)
        try:
            async with self._turn:
                reply = await self._calls.run(call)
        except _DebuggerLeft:
            raise KeyboardInterrupt from None
        (answer,) = FrameBuffer().feed(reply or b"")
        if answer["kind"] == "failed":
            self._open.pop(episode_id, None)
            raise EnvironmentFailed(episode_id, answer["reason"], answer["detail"])
        value: dict[str, Any] = answer["value"]
        self._open[episode_id] = bool(value.get("done"))
        return value

    def hold(self, episodes: Collection[int]) -> None:
        """Do nothing: there are no deadlines."""

    def close(self, episode_id: int) -> None:
        """Close the episode's environment in a task that `stop` waits for."""
        if self._open.pop(episode_id, None) is not None:
            closing = self._calls.run(Call("close", episode_id))
            task = asyncio.get_running_loop().create_task(closing)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
