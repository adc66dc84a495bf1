"""A request for an answer, whatever API it came by, and what is read alike in all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from earl_core.environments.base import FunctionCall, Message, ToolCall
from earl_core.environments.tools.toolbox import check_schema
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.rollout.gateway.bodies import characters, check_encodable
from earl_core.rollout.gateway.constraints import Constraint
from earl_core.rollout.gateway.refusals import invalid
from earl_core.system.errors import ConfigError

_MOST_STOPS = 64
_AROUND = 8
"""Characters that a template puts around a message, at least."""


@dataclass(frozen=True)
class Reading:
    """What a request is read against.

    template_options: names of variables that the chat template reads. vocabulary: how many tokens
    the policy may sample. constrained: as `rollout.requests` has it. earlier: the conversation
    after an answer of the session, by its id; None where there is none.
    """

    template_options: frozenset[str]
    vocabulary: int
    constrained: str = "free"
    earlier: Callable[[str], Sequence[Message] | None] = lambda _: None


@dataclass(frozen=True)
class ChatRequest:
    """The parts of a request that count.

    opening: text that the answer's message begins with. count: answers. token_ids, logprobs,
    usage: whether the reply has them. top: how many of the most likely tokens beside each.
    ids_as_text: whether texts of tokens are their ids. body: fields that the reply repeats. kept:
    the messages that a later request may go on after by the answer's name; None: it repeats them.
    """

    messages: list[Message]
    tools: Tools
    max_tokens: int | None
    model: str
    stream: bool
    opening: str = ""
    count: int = 1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    constraints: Sequence[Constraint] = ()
    usage: bool = False
    logprobs: bool = False
    top: int = 0
    ids_as_text: bool = False
    token_ids: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    kept: Sequence[Message] | None = None

    @property
    def characters(self) -> int:
        """Count the characters of all that the prompt may hold: every field of its messages, the
        tools' schemas, and the token or more that a template puts around each message."""
        said = sum(len(each["content"]) + _AROUND for each in self.messages)
        # `name`, ids and the calls, too.
        beside = (
            characters(value)
            for each in self.messages
            for key, value in each.items()
            if key not in ("role", "content")
        )
        return said + sum(beside) + len(self.tools.key) + len(self.opening)

    @property
    def texts(self) -> list[str]:
        """The longest of what is rendered."""
        return [*(each["content"] for each in self.messages), self.tools.key, self.opening]


def json_object(body: Any) -> Mapping[str, Any]:
    """Raises `HTTPException` for a body that is none."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return body


def text_of(content: Any, where: str, kinds: Sequence[str] = (), between: str = "") -> str:
    """A text, or its parts as one. kinds: types that a part may have; empty: any with a text.
    Raises `HTTPException` for what is no text."""
    if isinstance(content, list):
        texts = [
            part.get("text")
            if isinstance(part, Mapping) and (not kinds or part.get("type") in kinds)
            else None
            for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise invalid(f"{where} has a part that is no text")
        return between.join(str(text) for text in texts)
    if not isinstance(content, str):
        raise invalid(f"{where} must be a text")
    return content


def call_of(where: str, id_: Any, name: Any, given: Any) -> ToolCall:
    """A call. given: its arguments, a text of JSON, or an object; templates want the latter. Raises
    `HTTPException`."""
    if not isinstance(name, str):
        raise invalid(f"{where} has a call without a name")
    arguments = given
    if not isinstance(given, dict):
        try:
            arguments = json.loads(given or "{}")
        except (TypeError, ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}: the arguments of {name!r:.50} are no JSON object")
    if isinstance(given, str) and "\\u" in given:
        check_encodable(arguments, f"{where}: the arguments of {name[:50]}")
    read: FunctionCall = {"name": name, "arguments": arguments}
    return {"id": str(id_ or ""), "type": "function", "function": read}


def assistant(content: str, calls: Sequence[ToolCall], reasoning: str = "") -> Message:
    """A message of the assistant's. reasoning: that came apart from the content."""
    message: Message = {"role": "assistant", "content": content.strip()}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    if calls:
        message["tool_calls"] = list(calls)
    return message


def schemas(given: Any) -> list[dict[str, Any]]:
    """Schemas of tools in OpenAI's form. Raises `HTTPException` for what are none."""
    if not isinstance(given, list):
        raise invalid("tools must be a list")
    try:
        for schema in given:
            check_schema(schema)
    except ConfigError as error:
        raise invalid(str(error)) from error
    return given


def names_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of tools."""
    return [tool["function"]["name"] for tool in tools]


def template_options(given: Any, reading: Reading, where: str) -> dict[str, Any]:
    """Variables for the chat template. Raises `HTTPException` for one that it does not read."""
    if not isinstance(given, dict):
        raise invalid(f"{where} must be a JSON object")
    for name in given:
        if name not in reading.template_options:
            known = ", ".join(sorted(reading.template_options)) or "no such variable"
            raise invalid(f"{where} has {name!r:.50}, and the chat template reads {known}")
    return given


def effort(given: Any, reading: Reading, field: str) -> dict[str, Any]:
    """How much the model is to reason, for a template that is told. Raises `HTTPException` where
    none is."""
    if given is None:
        return {}
    if "reasoning_effort" in reading.template_options:
        return {"reasoning_effort": given}
    if given == "none" and "enable_thinking" in reading.template_options:
        return {"enable_thinking": False}
    raise invalid(f"{field} is not supported: the chat template does not read it")


def flag(body: Mapping[str, Any], key: str, where: str = "") -> bool | None:
    """The true or false of a field; None where it has none. where: in front of its name. Raises
    `HTTPException`: "false", a text, would count as true."""
    given = body.get(key)
    if given is not None and not isinstance(given, bool):
        raise invalid(f"{where}{key} must be true or false, not {given!r:.50}")
    return given


def whole_number(
    body: Mapping[str, Any], key: str, least: int, most: int | None = None
) -> int | None:
    """The whole number of a field; None where it has none. Raises `HTTPException`."""
    given = body.get(key)
    if given is None:
        return None
    if type(given) is not int or given < least or (most is not None and given > most):
        within = f"above {least - 1}" if most is None else f"from {least} to {most}"
        raise invalid(f"{key} must be a whole number {within}, not {given!r:.50}")
    return given


def token_ids(body: Mapping[str, Any], key: str, vocabulary: int) -> tuple[int, ...]:
    """The ids of tokens of a field. Raises `HTTPException`."""
    given = body.get(key) or []
    if not isinstance(given, list) or not all(
        type(each) is int and 0 <= each < vocabulary for each in given
    ):
        raise invalid(f"{key} must be whole numbers from 0 to {vocabulary - 1}")
    return tuple(given)


def stop_strings(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Strings that end the answer: one, or a list. Raises `HTTPException`."""
    given = body.get(key) or []
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or len(listed) > _MOST_STOPS:
        raise invalid(f"{key} must be a text or a list of {_MOST_STOPS} texts at most")
    if not all(isinstance(each, str) and each for each in listed):
        raise invalid(f"{key} must have texts that are not empty")
    return tuple(listed)


def arguments_text(call: ToolCall) -> str:
    """Arguments as OpenAI's APIs have them, a text of JSON."""
    return json.dumps(call["function"]["arguments"])
