"""Tools of servers that speak the Model Context Protocol, by the package `mcp`.

A host has a connection of its own to each server. One that breaks is made anew by the next call;
the episode that it broke under fails as lost, and is played anew.
https://modelcontextprotocol.io
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.tools.functions import Tool
from earl_core.secrets import redact, resolve
from earl_core.system.errors import ConfigError, EarlError

_OPEN_SECONDS = 60.0
_MOST_TOOLS = 1000
_MOST_CHARACTERS = 1_000_000
# A server begins a session of its own, so that the end of its host's group does not reach it.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Server:
    """One server. settings: `command` or `url`, as in `config.environment.McpConfig`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._client: Any = None
        self._broken = False
        self._holding: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._reconnecting = asyncio.Lock()
        self.name = settings.get("url") or " ".join(settings["command"])

    async def open(self) -> list[Tool]:
        """Connect; returns its tools. Raises ConfigError."""
        try:
            await asyncio.wait_for(self._connect(), _OPEN_SECONDS)
            found = await asyncio.wait_for(self._listed(), _OPEN_SECONDS)
        except ConfigError:
            raise
        except Exception as error:
            told = "it took over 60 s" if isinstance(error, TimeoutError) else _cause(error)
            raise ConfigError(
                redact(f"the MCP server {self.name!r} does not answer: {told}"),
                remedy="correct environment.mcp, or start the server",
            ) from None
        return [self._tool(each) for each in found]

    async def _listed(self) -> list[Any]:
        """List the tools of the server, page by page. Raises ConfigError."""
        found: list[Any] = []
        size, cursors, cursor = 0, set[str](), ""
        while True:
            page = await self._client.list_tools(cursor=cursor or None)
            found += page.tools
            size += sum(len(each.model_dump_json()) for each in page.tools)
            if len(found) > _MOST_TOOLS or size > _MOST_CHARACTERS:
                told = f"more than {_MOST_TOOLS} tools, or {_MOST_CHARACTERS:,} characters of them"
                raise self._endless(told)
            if page.next_cursor is None:
                return found
            if page.next_cursor in cursors or len(cursors) >= _MOST_TOOLS:
                raise self._endless("page after page of tools without an end")
            cursor = page.next_cursor
            cursors.add(cursor)

    def _endless(self, told: str) -> ConfigError:
        return ConfigError(
            redact(f"the MCP server {self.name!r} lists {told}"),
            remedy="correct the server, or take it out of environment.mcp",
        )

    async def close(self) -> None:
        """End the connection, and the server if it is ours."""
        self._over.set()
        if self._holding is not None:
            await asyncio.wait({self._holding})

    def _tool(self, found: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            return await self._call(str(found.name), arguments)

        about = {
            "name": found.name,
            "description": found.description or "",
            "parameters": found.input_schema,
        }
        return Tool({"type": "function", "function": about}, call, self._ready)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError

        client = self._client
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            if isinstance(error, MCPError) and "closed" not in str(error).lower():
                raise EarlError(str(error)) from error
            self._broken = True
            raise self._lost("was lost", error) from error
        text = "\n".join(map(_text, result.content[:_MOST_TOOLS]))
        if result.is_error:
            raise EarlError(text)
        return text

    async def _ready(self) -> None:
        """Connect again after a loss. Raises `EnvironmentFailed`."""
        async with self._reconnecting:
            if self._broken:
                try:
                    await self.close()
                    await asyncio.wait_for(self._connect(), _OPEN_SECONDS)
                except Exception as error:
                    raise self._lost("does not come back", error) from error
                self._broken = False

    def _lost(self, how: str, error: Exception) -> EnvironmentFailed:
        """The failure of a lost server, no fault of the call's: its episode is played anew."""
        text = redact(f"the MCP server {self.name!r} {how}: {_cause(error)}")
        return EnvironmentFailed(-1, "lost", text)

    async def _connect(self) -> None:
        """Connect in a task of its own: the protocol's streams close where they were opened."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._holding = asyncio.create_task(self._hold(ready, self._over))
        try:
            await ready
        except BaseException:
            self._holding.cancel()
            raise

    async def _hold(self, ready: asyncio.Future[None], over: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(await self._transport(stack))
                ready.set_result(None)
                await over.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters

        given = self._settings
        if command := given.get("command"):
            if shutil.which(command[0]) is None:
                raise FileNotFoundError(f"there is no program {command[0]!r}")
            variables = {name: resolve(value) for name, value in given["variables"].items()}
            arguments = ["-S", "-c", _BOUND, *command]
            server = StdioServerParameters(command=sys.executable, args=arguments, env=variables)
            return Client(server)
        from httpx2 import AsyncClient
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: resolve(value) for name, value in given["headers"].items()}
        http = await stack.enter_async_context(AsyncClient(headers=headers, timeout=_OPEN_SECONDS))
        return Client(streamable_http_client(str(given["url"]), http_client=http))


async def open_servers(settings: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The tools of all servers, connected as long as the event loop lives. Raises ConfigError."""
    if not settings:
        return []
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"environment.mcp needs the package mcp: {error}", remedy="pip install 'earl-rl[mcp]'"
        ) from error
    tools = await asyncio.gather(*(Server(each).open() for each in settings))
    return [tool for found in tools for tool in found]


def _text(block: Any) -> str:
    return str(block.text) if block.type == "text" else f"[{block.type}]"


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
