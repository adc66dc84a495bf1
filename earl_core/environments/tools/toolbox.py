"""The tools of an environment host: calls are checked, run, and answered by messages.

Whatever goes wrong with a call is told to the model, which may try again: an unknown tool,
arguments that the schema does not allow, an exception, a coroutine that takes too long. A plain
function cannot be stopped: one that does not return within a step's deadline costs its episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from earl_core.environments.base import (
    EnvironmentFailed,
    FunctionCall,
    Message,
    StepResult,
    ToolCall,
)
from earl_core.environments.tools.arguments import ArgumentCheck, is_costly, misfit
from earl_core.environments.tools.functions import Tool
from earl_core.system.errors import ConfigError, EarlError

OUTPUT_CHARACTERS = 2**15
"""Most characters of an output that the model gets: a longer one says which part is missing."""
_ERROR_CHARACTERS = 1000

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class Toolbox:
    """Tools by name. timeout_seconds: of a coroutine. Raises ConfigError for two of one name, and
    for schemas that are none."""

    def __init__(self, tools: Iterable[Tool], timeout_seconds: float) -> None:
        self._tools: dict[str, Tool] = {}
        self._timeout = timeout_seconds
        for tool in tools:
            check_schema(tool.schema)
            if tool.name in self._tools:
                raise ConfigError(
                    f"two tools have the name {tool.name!r}",
                    remedy="rename or drop one of them, or give an MCP server a `prefix`",
                )
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas that the model gets."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def notes(self) -> list[str]:
        """Notes for somebody who starts a run with these tools."""
        return [note for tool in self._tools.values() for note in tool.notes]

    async def ready(self, calls: Sequence[ToolCall]) -> None:
        """Connect to the servers of these calls. Raises `EnvironmentFailed`."""
        called = {call["function"]["name"] for call in calls}
        tools = [tool for tool in self._tools.values() if tool.name in called and tool.ready]
        await asyncio.gather(*(tool.ready() for tool in tools if tool.ready))

    async def use(self, calls: Sequence[ToolCall], in_thread: InThread) -> StepResult:
        """A message for each call, in their order; `info["tool_errors"]` says how many failed.
        in_thread: runs a plain function. These run one after the other, coroutines side by side."""
        turn = asyncio.Lock()

        async def answer(call: ToolCall) -> tuple[Message, bool]:
            name, number, failed = call["function"]["name"], call["id"], True
            try:
                text = _text(await self._run(call["function"], in_thread, turn))
                failed = False
            except EnvironmentFailed:
                raise
            except EarlError as error:
                text = _text(f"Error: {error}"[:_ERROR_CHARACTERS])
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                text = _text(f"Error: {type(error).__name__}: {error}"[:_ERROR_CHARACTERS])
            return Message(role="tool", content=text, tool_call_id=number, name=name), failed

        answers = await asyncio.gather(*map(answer, calls))
        errors = sum(failed for _, failed in answers)
        return StepResult([message for message, _ in answers], 0.0, False, {"tool_errors": errors})

    async def _run(self, call: FunctionCall, in_thread: InThread, turn: asyncio.Lock) -> Any:
        tool = self._tools.get(call["name"])
        if tool is None:
            raise EarlError(f"there is no tool {call['name']!r}: use {', '.join(self._tools)}")
        arguments = call["arguments"]
        await _check_arguments(tool, arguments)
        if inspect.iscoroutinefunction(tool.function):
            said = tool.function(**arguments)
        else:
            async with turn:
                said = await in_thread(partial(tool.function, **arguments))
        if not inspect.isawaitable(said):
            return said
        try:
            # A decorated coroutine function may be a plain one that returns the coroutine.
            async with asyncio.timeout(self._timeout) as limit:
                return await said
        except TimeoutError:
            if not limit.expired():
                raise
            raise EarlError(f"{tool.name} took over {self._timeout:g} s") from None


def check_schema(schema: Any) -> None:
    """Raise `ConfigError` unless it is the schema of a tool, as OpenAI's API has it."""
    from jsonschema import Draft202012Validator, SchemaError

    function = schema.get("function") if isinstance(schema, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ConfigError(
            f"a tool is described by {schema!r:.200}",
            remedy='write {"type": "function", "function": {"name", "description", "parameters"}}',
        )
    try:
        Draft202012Validator.check_schema(function.get("parameters") or {})
    except SchemaError as error:
        raise ConfigError(
            f"the parameters of the tool {name!r} are no JSON schema: {error.message:.300}"
        ) from None


_CHECK = ArgumentCheck()
"""The check of this process: tools are made anew for every environment."""


async def _check_arguments(tool: Tool, arguments: dict[str, Any]) -> None:
    parameters = tool.schema["function"].get("parameters") or {}
    named = parameters.get("properties", {})
    # `nullable` is OpenAPI's word, which templates know and JSON schema does not. A schema may be
    # true or false, too.
    nullable = {
        name for name, each in named.items() if isinstance(each, dict) and each.get("nullable")
    }
    given = {
        name: value
        for name, value in arguments.items()
        if value is not None or name not in nullable
    }
    if is_costly(parameters):
        why = await asyncio.to_thread(_CHECK.misfit, tool.name, parameters, given)
    else:
        why = misfit(parameters, given)
    if why:
        raise EarlError(f"{tool.name} cannot take these arguments: {why}")
    unknown = set(arguments) - set(named)
    if named and unknown and not parameters.get("additionalProperties"):
        raise EarlError(f"{tool.name} has no argument {', '.join(sorted(unknown))}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    value = value.encode("utf-8", "replace").decode()
    if len(value) <= OUTPUT_CHARACTERS:
        return str(value)
    missing = len(value) - OUTPUT_CHARACTERS
    return f"{value[:OUTPUT_CHARACTERS]}\n[{missing} more characters are left out]"
