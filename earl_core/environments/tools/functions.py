"""A tool from a Python function: its JSON schema comes of signature and docstring.

The docstring describes the function and, in a section `Args:`, each argument, as transformers'
`get_json_schema` wants it, which chat templates take functions by.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Union, get_args, get_origin, get_type_hints

from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_object, refuse_library
from earl_core.system.similar import meant

BUILT_IN = {
    "calculator": "earl_core.environments.tools.calculator:calculator",
    "python": "earl_core.environments.tools.python:python",
}

_PLAIN = (str, int, float, bool, list, tuple, dict, types.NoneType, Any)
"""The classes that the schema has words for. For any other class it would ask for an object."""


@dataclass(frozen=True)
class Tool:
    """schema: as chat templates and OpenAI's API have it, {"type": "function", "function": {"name",
    "description", "parameters"}}. function: called with the arguments by name; may be a coroutine
    function, whose time is limited. ready: awaited before that time begins. notes: what somebody
    who starts a run with it should know."""

    schema: dict[str, Any]
    function: Callable[..., Any]
    ready: Callable[[], Awaitable[None]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return str(self.schema["function"]["name"])


def load_tool(path: str) -> Tool:
    """A built-in tool by its name, or one by import path. Raises ConfigError."""
    if ":" not in path and path not in BUILT_IN:
        raise ConfigError(
            f"there is no tool {path!r}",
            remedy=f"{meant(path, BUILT_IN)}use one of {', '.join(BUILT_IN)}, or the import "
            "path of a function of your "
            "own, like 'package.module:function'",
        )
    function = import_object(BUILT_IN.get(path, path), "the tool")
    tool = tool_of(function, path)
    refuse_library(function, path, "the tool")
    if path not in BUILT_IN or not hasattr(function, "check"):
        return tool
    return replace(tool, notes=tuple(function.check()))


def tool_of(function: Callable[..., Any], path: str) -> Tool:
    """The tool that a function is. path: for messages. Raises ConfigError without type hints or
    descriptions, which the model needs."""
    try:
        # Takes a second to import, which environments without tools need not wait for.
        from transformers.utils import chat_template_utils
    except ImportError as error:
        raise ConfigError(
            f"tools need the packages transformers and jsonschema: {error}",
            remedy="install them beside the environment, in the Python of environment.python",
        ) from error
    if not callable(function):
        raise ConfigError(f"the tool {path!r} is not a function", remedy="name one")
    try:
        with _without_torch(chat_template_utils):
            schema = chat_template_utils.get_json_schema(function)
        _check_signature(function, path)
        return Tool(schema, function)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the tool {path!r} has no schema: {type(error).__name__}: {error}",
            remedy="give every argument a type, and a line in the docstring's section Args",
        ) from error


@contextmanager
def _without_torch(module: Any) -> Iterator[None]:
    """Have the module say that torch is not installed: it would import it, in every host, to know
    the type of an argument that is a tensor, which no tool may have."""
    asked = module.is_torch_available
    module.is_torch_available = lambda: False
    try:
        yield
    finally:
        module.is_torch_available = asked


def _check_signature(function: Callable[..., Any], path: str) -> None:
    """Raise `ConfigError` for arguments that no call can give: they come by name, as JSON."""
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"the argument {name!r} of the tool {path!r} cannot be given by name",
                remedy="do without *, ** and / in its signature",
            )
        for kind in _classes(hints[name]):
            if kind not in _PLAIN and not issubclass(kind, dict):
                raise ConfigError(
                    f"the argument {name!r} of the tool {path!r} is a {kind.__name__}, which JSON "
                    "does not have",
                    remedy="take a text, a number, a list, a dict or a Literal instead",
                )


def _classes(hint: Any) -> Iterator[type]:
    """Yield the classes that a type hint is made of."""
    if get_origin(hint) in (Union, types.UnionType, list, dict, tuple):
        for each in get_args(hint):
            yield from _classes(each)
    elif isinstance(hint, type) and get_origin(hint) is None:
        yield hint
