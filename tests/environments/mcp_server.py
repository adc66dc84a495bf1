"""A server of tools: `python mcp_server.py` speaks over its pipes, with a port and
`streamable-http` or `sse` over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")
texts: list[str] = []


@server.tool()
def double(number: int) -> str:
    """Doubles a number."""
    return str(2 * number)


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("the server's tool failed")


@server.tool()
async def wait() -> str:
    """Waits for an hour."""
    await asyncio.sleep(3600)
    return ""


@server.tool()
def variable() -> str:
    """Says what it was given."""
    return os.environ.get("GIVEN", "nothing")


@server.tool()
def remember(text: str) -> str:
    """Adds a text to those of this process, and says them all."""
    texts.append(text)
    return " ".join(texts)


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport=sys.argv[2], port=int(sys.argv[1]))  # type: ignore[call-overload]
    else:
        server.run()
