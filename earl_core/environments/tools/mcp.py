"""Tools of servers that speak the Model Context Protocol.

What a server keeps for a client, one episode alone shall read: each has a connection of its own,
and a process of its own of a `command`. `per: host` is for servers that keep nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.environments.tools.functions import Tool
from earl_core.environments.tools.mcp_connection import OPEN_SECONDS, Connection
from earl_core.secrets import redact
from earl_core.system.errors import ConfigError
from earl_core.system.similar import meant

_MOST_TOOLS = 1000
_MOST_CHARACTERS = 1_000_000


class Server:
    """One server of `environment.mcp`, and what it offers. starting: as in `Connection`."""

    def __init__(self, settings: Mapping[str, Any], starting: asyncio.Semaphore) -> None:
        self._settings = settings
        self._starting = starting
        self._first: Connection | None = self._made()
        self._shared = self._first if settings["per"] == "host" else None
        self._offered: list[Any] = []
        self.name = self._first.name

    async def open(self) -> None:
        """Connect, and ask for its tools. Raises ConfigError."""
        assert self._first is not None
        try:
            await self._first.open()
            found = await asyncio.wait_for(self._listed(self._first.client), OPEN_SECONDS)
        except ConfigError:
            raise
        except Exception as error:
            raise self._refused(
                f"does not answer: {self._first.told(error)}", "start the server"
            ) from None
        self._offered = self._chosen(found)

    def connect(self) -> Connection:
        """A connection for an episode, made at its first call. The one that asked for the tools
        serves the first episode."""
        if self._shared is not None:
            return self._shared
        first, self._first = self._first, None
        return first or self._made()

    async def disconnect(self, connection: Connection) -> None:
        """End an episode's connection."""
        if connection is not self._shared:
            await connection.close()

    def tools(self, connection: Connection | None = None) -> list[Tool]:
        """Its tools; without a connection for their schemas alone."""
        return [_tool(each, self._settings["prefix"], connection) for each in self._offered]

    def _made(self) -> Connection:
        return Connection(self._settings, self._starting)

    async def _listed(self, client: Any) -> list[Any]:
        """List the tools of the server, page by page. Raises ConfigError."""
        found: list[Any] = []
        size, cursors, cursor = 0, set[str](), ""
        while True:
            page = await client.list_tools(cursor=cursor or None)
            found += page.tools
            size += sum(len(each.model_dump_json()) for each in page.tools)
            if len(found) > _MOST_TOOLS or size > _MOST_CHARACTERS:
                told = f"more than {_MOST_TOOLS} tools, or {_MOST_CHARACTERS:,} characters of them"
                raise self._refused(f"lists {told}", "correct the server")
            if page.next_cursor is None:
                return found
            if page.next_cursor in cursors or len(cursors) >= _MOST_TOOLS:
                told = "page after page of tools without an end"
                raise self._refused(f"lists {told}", "correct the server")
            cursor = page.next_cursor
            cursors.add(cursor)

    def _chosen(self, found: Sequence[Any]) -> list[Any]:
        """The tools that `tools` names, in its order. Raises ConfigError."""
        offered = {str(each.name): each for each in found}
        if not offered:
            raise self._refused("has no tools", "correct the server")
        wanted = self._settings["tools"]
        for name in wanted or ():
            if name not in offered:
                remedy = f"{meant(name, offered)}use some of {', '.join(offered)}"
                raise self._refused(f"has no tool {name!r}", remedy)
        return [offered[name] for name in wanted] if wanted else list(found)

    def _refused(self, why: str, remedy: str) -> ConfigError:
        return ConfigError(
            redact(f"the MCP server {self.name!r} {why}"),
            remedy=f"{remedy}, or correct environment.mcp",
        )


async def open_servers(settings: Sequence[Mapping[str, Any]]) -> list[Server]:
    """Ask all servers for their tools. Raises ConfigError."""
    if not settings:
        return []
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"environment.mcp needs the package mcp: {error}", remedy="pip install 'earl-rl[mcp]'"
        ) from error
    starting = asyncio.Semaphore(os.cpu_count() or 1)
    servers = [Server(each, starting) for each in settings]
    await asyncio.gather(*(each.open() for each in servers))
    return servers


def _tool(found: Any, prefix: str, connection: Connection | None) -> Tool:
    async def call(**arguments: Any) -> str:
        assert connection is not None, "a schema is called"
        return await connection.call(str(found.name), arguments)

    about = {
        "name": prefix + found.name,
        "description": found.description or "",
        "parameters": found.input_schema,
    }
    ready = connection.ready if connection else None
    return Tool({"type": "function", "function": about}, call, ready)
