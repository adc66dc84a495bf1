"""The tools of a host: functions, the methods of its environments, and servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from earl_core.environments.tools.functions import Tool, tool_of
from earl_core.environments.tools.mcp import Server
from earl_core.environments.tools.mcp_connection import Connection
from earl_core.environments.tools.toolbox import Toolbox
from earl_core.system.errors import ConfigError


class HostTools:
    """What the model may call in the episodes of a host. timeout_seconds: of a coroutine."""

    def __init__(
        self, functions: Sequence[Tool], servers: Sequence[Server], timeout_seconds: float
    ) -> None:
        self._functions, self._servers, self._timeout = functions, servers, timeout_seconds

    def offered(self, environment: Any) -> Toolbox:
        """What episodes of this environment, an object or its class, can call. Raises
        ConfigError."""
        tools = [tool for server in self._servers for tool in server.tools()]
        return Toolbox([*self._functions, *tools, *_methods(environment)], self._timeout)

    def of_episode(self, environment: Any) -> EpisodeTools:
        """The tools of one episode."""
        connections = [(server, server.connect()) for server in self._servers]
        tools = [tool for server, own in connections for tool in server.tools(own)]
        all_tools = [*self._functions, *tools, *_methods(environment)]
        return EpisodeTools(Toolbox(all_tools, self._timeout), connections)


class EpisodeTools:
    """The toolbox of one episode, and its connections to servers."""

    def __init__(self, toolbox: Toolbox, connections: Sequence[tuple[Server, Connection]]) -> None:
        self.toolbox = toolbox
        self._connections = connections

    async def close(self) -> None:
        """End the connections that are the episode's own."""
        await asyncio.gather(*(server.disconnect(own) for server, own in self._connections))


def _methods(environment: Any) -> list[Tool]:
    """The methods that the environment names in `tools`."""
    kind = environment if isinstance(environment, type) else type(environment)
    names = getattr(environment, "tools", ())
    return [_method(environment, name, f"{kind.__name__}.{name}") for name in names]


def _method(environment: Any, name: str, path: str) -> Tool:
    method = getattr(environment, name, None)
    if method is None:
        raise ConfigError(f"the environment names a tool {path!r} that it does not have")
    if isinstance(environment, type):
        # Bound to nothing, for its schema alone.
        method = method.__get__(object())
    return tool_of(method, path)
