"""A tool from a Python function: its JSON schema comes of signature and docstring.

The docstring describes the function and, in a section `Args:`, each argument, as transformers'
`get_json_schema` wants it, which chat templates take functions by.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_object

BUILT_IN = {
    "calculator": "earl_core.environments.tools.calculator:calculator",
    "python": "earl_core.environments.tools.python:python",
}


@dataclass(frozen=True)
class Tool:
    """schema: as chat templates and OpenAI's API have it, {"type": "function", "function": {"name",
    "description", "parameters"}}. function: called with the arguments by name; may be a coroutine
    function, whose time is limited. ready: awaited before that time begins."""

    schema: dict[str, Any]
    function: Callable[..., Any]
    ready: Callable[[], Awaitable[None]] | None = None

    @property
    def name(self) -> str:
        """By which the model calls it."""
        return str(self.schema["function"]["name"])


def load_tool(path: str) -> Tool:
    """A built-in tool by its name, or one by import path. Raises ConfigError."""
    if ":" not in path and path not in BUILT_IN:
        raise ConfigError(
            f"there is no tool {path!r}",
            remedy=f"use one of {', '.join(BUILT_IN)}, or the import path of a function of your "
            "own, like 'package.module:function'",
        )
    function = import_object(BUILT_IN.get(path, path), "the tool")
    check = getattr(function, "check", None)
    if check is not None:
        check()
    return tool_of(function, path)


def tool_of(function: Callable[..., Any], path: str) -> Tool:
    """The tool that a function is. path: for messages. Raises ConfigError without type hints or
    descriptions, which the model needs."""
    try:
        # Takes a second to import, which environments without tools need not wait for.
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError as error:
        raise ConfigError(
            f"tools need the packages transformers and jsonschema: {error}",
            remedy="install them beside the environment, in the Python of environment.python",
        ) from error
    if not callable(function):
        raise ConfigError(f"the tool {path!r} is not a function", remedy="name one")
    try:
        return Tool(get_json_schema(function), function)
    except Exception as error:
        raise ConfigError(
            f"the tool {path!r} has no schema: {type(error).__name__}: {error}",
            remedy="give every argument a type, and a line in the docstring's section Args",
        ) from error
