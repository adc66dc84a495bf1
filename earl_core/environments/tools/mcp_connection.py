"""A connection to a server that speaks the Model Context Protocol, by the package `mcp`.

It is made when it is first needed, and anew by the next call after it broke: the episode that it
broke under fails as lost, and is played anew. https://modelcontextprotocol.io
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from earl_core.environments.base import EnvironmentFailed
from earl_core.secrets import redact, resolve
from earl_core.system.child import bound
from earl_core.system.errors import EarlError
from earl_core.system.last_words import LastWords

OPEN_SECONDS = 60.0
_MOST_BLOCKS = 1000
_ERROR_CHARACTERS = 1000
_HTTP = {
    401: "give its key in `headers`",
    403: "give its key in `headers`",
    404: "it has no endpoint of streamable HTTP at this path, which often ends in /mcp",
    405: "it does not speak streamable HTTP at this path; servers that speak SSE alone are not "
    "supported",
}


class Connection:
    """One connection. settings: `command` or `url`, as in `config.environment.McpConfig`. starting:
    held while it connects, so that not all processes of a host's episodes start at once."""

    def __init__(self, settings: Mapping[str, Any], starting: asyncio.Semaphore) -> None:
        self.client: Any = None
        self.name = settings.get("url") or " ".join(settings["command"])
        self._settings = settings
        self._starting = starting
        self._whole = False
        self._holding: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._connecting = asyncio.Lock()
        self._status = 0
        self._errors = LastWords(_ERROR_CHARACTERS, sys.stderr.write)

    async def ready(self) -> None:
        """Connect, unless it is connected. Raises `EnvironmentFailed`."""
        try:
            await self.open()
        except Exception as error:
            raise self._lost("does not answer", error) from error

    async def open(self) -> None:
        """Connect, unless it is connected; raises what stands in the way."""
        async with self._connecting:
            if self._whole:
                return
            async with self._starting:
                await self.close()
                await asyncio.wait_for(self._connect(), OPEN_SECONDS)
                self._whole = True

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool; returns the text of its result. Raises `EarlError` for the tool's own
        failure, `EnvironmentFailed` for a lost server."""
        from mcp import MCPError

        try:
            result = await self.client.call_tool(name, arguments)
        except Exception as error:
            if isinstance(error, MCPError) and "closed" not in str(error).lower():
                raise EarlError(str(error)) from error
            self._whole = False
            raise self._lost("was lost", error) from error
        text = "\n".join(map(_text, result.content[:_MOST_BLOCKS]))
        if result.is_error:
            raise EarlError(text)
        return text

    async def close(self) -> None:
        """End the connection, and the server if it is ours."""
        self._whole = False
        self._over.set()
        if self._holding is not None:
            await asyncio.wait({self._holding})

    def told(self, error: BaseException) -> str:
        """Why it failed: the error, the status of HTTP, and the end of stderr."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            text = f"it took over {OPEN_SECONDS:g} s"
        if self._status >= 400:
            text = f"HTTP {self._status} ({_HTTP.get(self._status, text)})"
        if words := self._errors.text.strip():
            text += f"; its stderr ends with:\n{words}"
        return redact(text)

    def _lost(self, how: str, error: Exception) -> EnvironmentFailed:
        """The failure of a lost server, no fault of the call's: its episode is played anew."""
        text = redact(f"the MCP server {self.name!r} {how}: {self.told(error)}")
        return EnvironmentFailed(-1, "lost", text)

    async def _connect(self) -> None:
        """Connect in a task of its own: the protocol's streams close where they were opened."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._status = 0
        self._errors = LastWords(_ERROR_CHARACTERS, sys.stderr.write)
        self._holding = asyncio.create_task(self._hold(ready, self._over))
        try:
            await ready
        except BaseException:
            # It tells what the server wrote, which is read to its end.
            self._holding.cancel()
            await asyncio.wait({self._holding})
            raise

    async def _hold(self, ready: asyncio.Future[None], over: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                self.client = await stack.enter_async_context(await self._transport(stack))
                ready.set_result(None)
                await over.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        given = self._settings
        if command := given.get("command"):
            if shutil.which(command[0]) is None:
                raise FileNotFoundError(f"there is no program {command[0]!r}")
            variables = {name: resolve(value) for name, value in given["variables"].items()}
            # It begins a session, so that the end of its host's group does not reach it.
            program, *arguments = bound(command)
            server = StdioServerParameters(command=program, args=arguments, env=variables)
            reading, writing = os.pipe()
            following = asyncio.create_task(self._follow(reading))
            # A grandchild may hold the pipe open.
            stack.push_async_callback(asyncio.wait, {following}, timeout=1)
            stderr = stack.enter_context(os.fdopen(writing, "w"))
            return Client(stdio_client(server, stderr))
        from httpx2 import AsyncClient

        headers = {name: resolve(value) for name, value in given["headers"].items()}
        http = await stack.enter_async_context(
            AsyncClient(
                headers=headers, timeout=OPEN_SECONDS, event_hooks={"response": [self._answered]}
            )
        )
        return Client(streamable_http_client(str(given["url"]), http_client=http))

    async def _answered(self, response: Any) -> None:
        self._status = response.status_code

    async def _follow(self, descriptor: int) -> None:
        """Pass the server's stderr on to the host's and keep its end."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
        )
        try:
            await self._errors.read(reader)
        finally:
            transport.close()


def _text(block: Any) -> str:
    return str(block.text) if block.type == "text" else f"[{block.type}]"
