"""The agent of `agent.py`; its tools are those of an MCP server."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from agent import API, solve
from mcp import Client, StdioServerParameters

SERVER = StdioServerParameters(
    command=sys.executable, args=[str(Path(__file__).with_name("server.py"))]
)
_opened: asyncio.Future[Client] | None = None
_holding: asyncio.Task[None] | None = None


async def run(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """One episode, for EARL: a task, the policy's address, and the reward."""
    server = await _connection()
    tools = [_as_openai_has_it(tool) for tool in (await server.list_tools()).tools]

    async def call(name: str, arguments: dict[str, Any]) -> str:
        result = await server.call_tool(name, arguments)
        text = "\n".join(block.text for block in result.content if block.type == "text")
        if result.is_error:
            raise ValueError(text)
        return text

    policy = API.with_options(base_url=base_url, api_key=api_key)
    return await solve(policy, task["index"], tools, call)


async def _connection() -> Client:
    """One for the process, which all its episodes share: this server only reads.

    One that an episode changes is opened in `run` instead: `async with Client(SERVER) as server`.
    """
    global _opened, _holding
    if _opened is None:
        _opened = asyncio.get_running_loop().create_future()
        _holding = asyncio.create_task(_hold(_opened))
    return await asyncio.shield(_opened)


async def _hold(opened: asyncio.Future[Client]) -> None:
    """In a task of its own, which ends with the process: a client is closed where it was opened."""
    try:
        async with Client(SERVER) as server:
            opened.set_result(server)
            await asyncio.Event().wait()
    except Exception as error:
        if not opened.done():
            opened.set_exception(error)


def _as_openai_has_it(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}
