"""Rows of a data set read as chats: messages and tools in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.environments.base import FunctionCall, Message, ToolCall
from earl_core.environments.tools.arguments import is_costly, misfit
from earl_core.environments.tools.toolbox import check_schema
from earl_core.rollout.chat.tool_calls import call_id
from earl_core.system.errors import ConfigError
from earl_core.system.similar import meant


def read_messages(row: Mapping[str, Any], column: str) -> list[Message]:
    """The messages of a row, one of the assistant at least. Raises `ConfigError` that goes on after
    the row's place."""
    if column not in row:
        raise ConfigError(
            f"has no column {column!r}, it has {', '.join(row)}",
            remedy=f"{meant(column, row)}name the column in imitation.messages",
        )
    given = row[column]
    if not isinstance(given, list) or not given:
        raise ConfigError(f"has in the column {column!r} no list of messages")
    messages = [_message(number, each) for number, each in enumerate(given)]
    _link(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(
            "has no turn of the assistant, so there is nothing to imitate", remedy="leave it out"
        )
    return messages


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a row's column `tools`, a list or a text of JSON; None where it says nothing.
    Raises as `read_messages`."""
    given = row.get("tools")
    if isinstance(given, str) and given.strip():
        given = _parsed(given, "in the column 'tools' a text that")
    if given is None or given == "":
        return None
    if not isinstance(given, list):
        raise ConfigError("has in the column 'tools' no list of tools")
    for schema in given:
        try:
            check_schema(schema)
        except ConfigError as error:
            raise ConfigError(f"has tools that cannot be used, {error}") from error
    return given


def _message(number: int, message: Any) -> Message:
    where = f"has in messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{where} no message with role and content")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ConfigError(f"{where} tool_calls that are no list")
    read: Message = {"role": message["role"], "content": _content(where, message, bool(calls))}
    if read["role"] == "assistant":
        _check_answer(where, message)
        if not (calls or read["content"].strip()):
            raise ConfigError(f"{where} an answer that says nothing, so there is nothing to learn")
    if calls:
        read["tool_calls"] = [_call(where, each) for each in calls]
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            read[key] = message[key]
    return read


_UNREAD = ("function_call", "reasoning", "reasoning_content", "thinking")
"""Parts of an answer that other libraries read, and nobody here."""


def _check_answer(where: str, message: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an answer that is more than its content and calls, or none."""
    for key in _UNREAD:
        if message.get(key):
            raise ConfigError(
                f"{where} an answer with {key}, which would be left out",
                remedy="write reasoning into its content, between <think> and </think>, and calls "
                "as tool_calls",
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
