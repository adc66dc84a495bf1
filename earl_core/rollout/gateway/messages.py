"""Anthropic's Messages as JSON: translated onto the messages of chat completions, and back.

A last message of the assistant's is gone on with, as that API has it.
https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from earl_core.environments.base import Message
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.rollout.gateway import chat_completions, chat_request, constraints
from earl_core.rollout.gateway.call import Answer
from earl_core.rollout.gateway.chat_request import ChatRequest, Reading
from earl_core.rollout.gateway.constraints import Constraint
from earl_core.rollout.gateway.fields import MESSAGES, check
from earl_core.rollout.gateway.refusals import invalid

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def parse(body: Any, reading: Reading) -> ChatRequest:
    """Raises `HTTPException` with the field that is wrong."""
    body = chat_request.json_object(body)
    check(body, MESSAGES)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages must be a list of at least one message")
    messages: list[Message] = []
    for number, message in enumerate(given):
        messages += _read(f"messages[{number}]", message)
    opening = ""
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise invalid("messages must end with the results of the last calls")
        messages.pop()
        opening = "".join(_texts(f"messages[{len(given) - 1}]", given[-1]["content"]))
    if body.get("system"):
        system = "\n".join(_texts("system", body["system"]))
        messages.insert(0, Message(role="system", content=system))
    tools, asked = _tools(body)
    output = body.get("output_config") or {}
    if not isinstance(output, Mapping):
        raise invalid("output_config must be a JSON object")
    asked += constraints.of_format("output_config.format", output.get("format"))
    constraints.check(asked, reading.constrained, opening)
    options = _thinking(body, reading)
    options |= chat_request.effort(output.get("effort"), reading, "output_config.effort")
    return ChatRequest(
        messages=messages,
        opening=opening,
        tools=Tools(tools, options),
        max_tokens=chat_request.whole_number(body, "max_tokens", 1),
        model=str(body.get("model", "")),
        stream=chat_request.flag(body, "stream") or False,
        stop=chat_request.stop_strings(body, "stop_sequences"),
        constraints=asked,
    )


def reply(request: ChatRequest, answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """The body of a reply that is not streamed."""
    (answer,) = answers
    return {
        **_head(request, name),
        "content": _blocks(answer),
        **_ended(answer),
        "usage": _usage(answer),
    }


class Chunks:
    """A reply as server-sent events: pieces of the first block's text, and what is known when the
    answer is whole."""

    def __init__(self, request: ChatRequest, name: str) -> None:
        self._request, self._name = request, name
        self._begun = self._opened = False

    def piece(self, text: str) -> str:
        """The events of the next piece."""
        return "".join([*self._begins(), *self._text_begins(), self._text(text)])

    def end(self, answers: Sequence[Answer], sent: str) -> Iterator[str]:
        """The last events. sent: the text of all pieces."""
        (answer,) = answers
        yield from self._begins()
        for index, block in enumerate(_blocks(answer)):
            if block["type"] == "text":
                yield from self._text_begins()
                if rest := block["text"][len(sent) :]:
                    yield self._text(rest)
            else:
                begun = {**block, "input": {}}
                yield _event("content_block_start", index=index, content_block=begun)
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_ended(answer), usage=_usage(answer))
        yield _event("message_stop")

    def error(self, body: dict[str, Any]) -> str:
        """The event of a refusal after the first piece. body: as `error_body` makes it."""
        return chat_completions.event(body, "error")

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """As the module's."""
        return error_body(status, code, message)

    def _begins(self) -> Iterator[str]:
        if not self._begun:
            self._begun = True
            # How long the prompt is comes with the end.
            message = {
                **_head(self._request, self._name),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": 0, "output_tokens": 0},
            }
            yield _event("message_start", message=message)

    def _text_begins(self) -> Iterator[str]:
        if not self._opened:
            self._opened = True
            block = {"type": "text", "text": ""}
            yield _event("content_block_start", index=0, content_block=block)

    def _text(self, text: str) -> str:
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """The body of a refusal, as Anthropic's clients read it. code: as OpenAI has them."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


def _read(where: str, message: Any) -> list[Message]:
    """The messages that one of a request is: results of calls are messages of their own."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where} must be an object with the role user or assistant")
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    calls, results, thought = [], [], ""
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(
                chat_request.call_of(place, block.get("id"), block.get("name"), block.get("input"))
            )
        elif kind == "thinking" and role == "assistant":
            thought += chat_request.text_of(block.get("thinking"), f"{place}.thinking")
        elif kind == "tool_result" and role == "user":
            said = "\n".join(_texts(place, block.get("content") or ""))
            id_ = str(block.get("tool_use_id", ""))
            results.append(Message(role="tool", content=said, tool_call_id=id_))
        else:
            texts += _texts(place, [block])
    if role == "assistant":
        return [chat_request.assistant("".join(texts), calls, thought)]
    if results and not texts:
        return results
    return [*results, Message(role=role, content="\n".join(texts))]


def _texts(where: str, content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise invalid(f"{where} must be a text or a list of texts")
    return [chat_request.text_of([part], where, ("text",)) for part in content]


def _tools(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Constraint]]:
    """Tools and choice, read as those of chat completions."""
    given = body.get("tools") or []
    if not isinstance(given, list):
        raise invalid("tools must be a list")
    schemas = []
    for number, tool in enumerate(given):
        if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
            raise invalid(f"tools[{number}] is no function of the caller: no other is called")
        about = {key: tool[key] for key in ("name", "description") if key in tool}
        about["parameters"] = tool.get("input_schema") or {}
        schemas.append({"type": "function", "function": about})
    choice = body.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in (*_CHOICES, "tool"):
        raise invalid("tool_choice must be an object of type auto, any, tool or none")
    asked: Any = _CHOICES.get(kind)
    if kind == "tool":
        asked = {"type": "function", "function": {"name": choice.get("name")}}
    parallel = not chat_request.flag(choice, "disable_parallel_tool_use", "tool_choice.")
    return chat_completions.tools_and_choice(
        {"tool_choice": asked, "parallel_tool_calls": parallel}, chat_request.schemas(schemas)
    )


def _thinking(body: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    thinking = body.get("thinking")
    if thinking is None or "enable_thinking" not in reading.template_options:
        return {}
    if not isinstance(thinking, Mapping):
        raise invalid("thinking must be a JSON object")
    return {"enable_thinking": thinking.get("type") != "disabled"}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    text, calls = answer.message["content"], answer.message.get("tool_calls", ())
    blocks: list[dict[str, Any]] = []
    if text.strip() or not calls:
        blocks.append({"type": "text", "text": text})
    for call in calls:
        function = call["function"]
        used = {"id": call["id"], "name": function["name"], "input": function["arguments"]}
        blocks.append({"type": "tool_use", **used})
    return blocks


def _head(request: ChatRequest, name: str) -> dict[str, Any]:
    about = {"id": f"msg_{name}", "type": "message", "role": "assistant"}
    return {**about, "model": request.model}


def _ended(answer: Answer) -> dict[str, str | None]:
    reason = _STOPS[answer.finish_reason]
    if answer.stopped_by and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by or None}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": len(answer.prompt),
        "output_tokens": len(answer.completion.tokens),
    }


def _event(kind: str, **content: Any) -> str:
    return chat_completions.event({"type": kind, **content}, kind)
