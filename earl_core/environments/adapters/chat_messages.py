"""Messages and tools of a data set, in OpenAI's form or ShareGPT's, as templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from earl_core.environments.adapters.row_files import Row
from earl_core.environments.base import FunctionCall, Message, ToolCall, call_id
from earl_core.environments.tools.arguments import is_costly, misfit
from earl_core.environments.tools.toolbox import check_schema
from earl_core.system.errors import ConfigError


def read_messages(given: Sequence[Any], learnt: bool = False) -> list[Message]:
    """Messages in OpenAI's form. learnt: whether every answer among them is to be imitated. Raises
    `ConfigError` that goes on after the row's place."""
    messages = [_message(number, each, learnt) for number, each in enumerate(given)]
    _link(messages)
    return messages


_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def read_turns(given: Sequence[Any], learnt: bool = False) -> list[Message]:
    """Turns in ShareGPT's form, `from` and `value`; `function_call` is an answer that is a call,
    written as JSON. Raises as `read_messages`."""
    return read_messages([_turn(number, each) for number, each in enumerate(given)], learnt)


def _turn(number: int, turn: Any) -> Row:
    where = f"has in conversations[{number}]"
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
        raise ConfigError(f"{where} no turn with from and value")
    speaker, said = turn.get("from"), turn["value"]
    if speaker == "function_call":
        calls = _parsed(said, f"in conversations[{number}] a function_call that")
        calls = calls if isinstance(calls, list) else [calls]
        functions = [_function(number, call) for call in calls]
        return {"role": "assistant", "tool_calls": [{"function": each} for each in functions]}
    if speaker not in _SPEAKERS:
        known = ", ".join([*_SPEAKERS, "function_call"])
        raise ConfigError(f"{where} a turn from {speaker!r:.50}, which is none of {known}")
    return {"role": _SPEAKERS[speaker], "content": said}


def _function(number: int, call: Any) -> Any:
    """The function of a call; some write its arguments as `parameters`."""
    if not isinstance(call, Mapping):
        return call
    key = "arguments" if "arguments" in call else "parameters"
    if other := sorted(set(call) - {"name", key}):
        raise ConfigError(
            f"has in conversations[{number}] a function_call with {', '.join(map(str, other))}",
            remedy="write name and arguments",
        )
    return {"name": call.get("name"), "arguments": call.get(key)}


def read_tools(row: Mapping[str, Any], declared: bool) -> list[dict[str, Any]] | None:
    """The tools of a row's column `tools`, a list or a text of JSON; None where it says nothing.
    declared: whether the form is; else a column without a list of mappings is the row's own.
    Raises as `read_messages`."""
    given = row.get("tools")
    written = isinstance(given, str)
    if isinstance(given, str):
        if not given.strip():
            return None
        if declared or given.lstrip().startswith("["):
            given = _parsed(given, "in the column 'tools' a text that")
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        if declared:
            raise ConfigError("has in the column 'tools' no list of tools")
        return None
    # A table gives every schema the keys of all of its schemas.
    given = given if written else _without_nulls(given)
    # Some write the function alone.
    given = [{"type": "function", "function": each} if _is_bare(each) else each for each in given]
    for schema in given:
        try:
            _check_tool(json.dumps(schema, default=str))
        except ConfigError as error:
            raise ConfigError(f"has tools that cannot be used, {error}") from error
    return given


@lru_cache(maxsize=4096)
def _check_tool(text: str) -> None:
    """Raise `ConfigError` for no tool. Rows share their tools, and a check takes milliseconds."""
    check_schema(json.loads(text))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _is_bare(tool: Mapping[str, Any]) -> bool:
    # Other APIs write the parameters elsewhere; without them the function would take nothing.
    return "name" in tool and not {"function", "input_schema", "inputSchema"} & tool.keys()


def _message(number: int, message: Any, learnt: bool) -> Message:
    where = f"has in messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{where} no message with role and content")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ConfigError(f"{where} tool_calls that are no list")
    if message["role"] == "assistant" and message.get("function_call"):
        raise ConfigError(f"{where} an answer with function_call", remedy="write it as tool_calls")
    role = "system" if message["role"] == "developer" else message["role"]
    read: Message = {"role": role, "content": _content(where, message, bool(calls))}
    if role == "assistant" and learnt:
        _check_answer(where, message)
        if not (calls or read["content"].strip()):
            raise ConfigError(f"{where} an answer that says nothing, so there is nothing to learn")
    if calls:
        read["tool_calls"] = [_call(where, each) for each in calls]
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            read[key] = message[key]
    return read


_UNREAD = ("reasoning", "reasoning_content", "thinking")
"""Parts of an answer that other libraries read, and nobody here."""


def _check_answer(where: str, message: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an answer that is more than its content and calls, or none."""
    for key in _UNREAD:
        if message.get(key):
            raise ConfigError(
                f"{where} an answer with {key}, which would be left out",
                remedy="write reasoning into its content, between <think> and </think>",
            )
    for key in ("weight", "train"):
        if message.get(key) in (0, False):
            raise ConfigError(
                f"{where} an answer with {key} {message[key]!r}, and every answer of a chat is "
                "learnt",
                remedy="end the chat before it, or leave the key out",
            )


def _link(messages: Sequence[Message]) -> None:
    """Give calls and results what a rollout's have, where they have none: a call its id, and a
    result the id and the name of the call that it is of."""
    number, waiting = 0, list[ToolCall]()
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or call_id(number)
            number += 1
            waiting.append(call)
        if message["role"] != "tool":
            continue
        told = message.get("tool_call_id")
        answered = next((call for call in waiting if told in (None, call["id"])), None)
        if answered is not None:
            waiting.remove(answered)
            message["tool_call_id"] = answered["id"]
            message.setdefault("name", answered["function"]["name"])


def drop_absent(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Drop arguments that are null where the tool takes no null: a table gives every call the
    arguments of all of its calls."""
    named = {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if function["name"] in named:
                known = named[function["name"]].get("properties") or {}
                function["arguments"] = {
                    name: value
                    for name, value in function["arguments"].items()
                    if value is not None or (name in known and _takes_null(known[name]))
                }


def _takes_null(schema: Any) -> bool:
    if isinstance(schema, Mapping) and (schema.get("nullable") or is_costly(schema)):
        return True
    nothing: Any = None
    return not misfit(schema, nothing)


def _content(where: str, message: Mapping[str, Any], calls: bool) -> str:
    content = message.get("content")
    if content is None and calls:
        return ""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise ConfigError(f"{where} a content that is no text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} half a character, which UTF-8 cannot hold") from None
    return content


def _call(where: str, call: Any) -> ToolCall:
    """Arguments may be a text of JSON, which is what Parquet keeps as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ConfigError(f"{where} a call without function.name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"in messages[...] a call of {name!r:.50} whose arguments")
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where} a call of {name!r:.50} whose arguments are no JSON object")
    read: FunctionCall = {"name": name, "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": read}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"has {what} is no JSON ({error})") from error
