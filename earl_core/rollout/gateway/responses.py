"""OpenAI's Responses as JSON: translated onto the messages of chat completions, and back.

An answer is a message, calls of functions, or both; `previous_response_id` is the conversation
after an answer of this session, on which the request goes on as a branch.
https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from earl_core.environments.base import Message
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.rollout.gateway import chat_completions, chat_request, constraints
from earl_core.rollout.gateway.call import Answer
from earl_core.rollout.gateway.chat_request import ChatRequest, Reading
from earl_core.rollout.gateway.fields import RESPONSES, check
from earl_core.rollout.gateway.refusals import invalid

ID = "resp_"
"""Begins the ids of answers."""
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")
_REPEATED = ("instructions", "metadata", "previous_response_id", "tool_choice", "tools")

error_body = chat_completions.error_body


def parse(body: Any, reading: Reading) -> ChatRequest:
    """Raises `HTTPException` with the field that is wrong."""
    body = chat_request.json_object(body)
    check(body, RESPONSES)
    messages = [*_earlier(body, reading), *_messages(body.get("input"))]
    instructions = body.get("instructions")
    system = []
    if instructions:
        text = chat_request.text_of(instructions, "instructions")
        system = [Message(role="system", content=text)]
    given = [_schema(number, tool) for number, tool in enumerate(_list(body, "tools"))]
    tools, asked = chat_completions.tools_and_choice(body, chat_request.schemas(given))
    text_options, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    if not isinstance(text_options, Mapping) or not isinstance(reasoning, Mapping):
        raise invalid("text and reasoning must be JSON objects")
    if text_options.get("verbosity") not in (None, "medium"):
        raise invalid("text.verbosity is not supported: ask for it in a message")
    asked += constraints.of_format("text.format", text_options.get("format"))
    constraints.check(asked, reading.constrained)
    effort = chat_request.effort(reasoning.get("effort"), reading, "reasoning.effort")
    return ChatRequest(
        messages=[*system, *messages],
        tools=Tools(tools, effort),
        max_tokens=chat_request.whole_number(body, "max_output_tokens", 1),
        model=str(body.get("model", "")),
        stream=chat_request.flag(body, "stream") or False,
        constraints=asked,
        body={key: body.get(key) for key in _REPEATED},
        kept=messages,
    )


def reply(request: ChatRequest, answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """The body of a reply that is not streamed."""
    (answer,) = answers
    return _whole(request, name, answer, _items(name, answer))


class Chunks:
    """A reply as server-sent events: pieces of the message's text, and what is known when the
    answer is whole."""

    def __init__(self, request: ChatRequest, name: str) -> None:
        self._request, self._name = request, name
        self._number = 0
        self._begun = self._opened = False

    def piece(self, text: str) -> str:
        """The events of the next piece."""
        return "".join([*self._message_begins(), self._text(text)])

    def end(self, answers: Sequence[Answer], sent: str) -> Iterator[str]:
        """The last events. sent: the text of all pieces."""
        (answer,) = answers
        yield from self._begins()
        items = _items(self._name, answer)
        for index, item in enumerate(items):
            if item["type"] == "message":
                yield from self._message_begins()
                part = item["content"][0]
                yield self._text(part["text"][len(sent) :])
                place = {"item_id": item["id"], "output_index": index, "content_index": 0}
                yield self._event("output_text.done", text=part["text"], logprobs=[], **place)
                yield self._event("content_part.done", part=part, **place)
            else:
                place = {"item_id": item["id"], "output_index": index}
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("output_item.added", output_index=index, item=begun)
                arguments = item["arguments"]
                yield self._event("function_call_arguments.delta", delta=arguments, **place)
                yield self._event(
                    "function_call_arguments.done",
                    arguments=arguments,
                    name=item["name"],
                    **place,
                )
            yield self._event("output_item.done", output_index=index, item=item)
        whole = _whole(self._request, self._name, answer, items)
        yield self._event(whole["status"], response=whole)

    def error(self, body: dict[str, Any]) -> str:
        """The event of a refusal after the first piece. body: as `error_body` makes it."""
        about = body["error"]
        told = {"type": "error", "code": about["code"], "message": about["message"], "param": None}
        return chat_completions.event({**told, "sequence_number": self._number}, "error")

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """As the module's."""
        return error_body(status, code, message)

    def _begins(self) -> Iterator[str]:
        if not self._begun:
            self._begun = True
            empty = _whole(self._request, self._name, None, [])
            yield self._event("created", response=empty)
            yield self._event("in_progress", response=empty)

    def _message_begins(self) -> Iterator[str]:
        yield from self._begins()
        if not self._opened:
            self._opened = True
            item = _message_item(self._name, "", "in_progress")
            (part,) = item["content"]
            yield self._event("output_item.added", output_index=0, item={**item, "content": []})
            yield self._event(
                "content_part.added", item_id=item["id"], output_index=0, content_index=0, part=part
            )

    def _text(self, text: str) -> str:
        return self._event(
            "output_text.delta",
            item_id=f"msg_{self._name}",
            output_index=0,
            content_index=0,
            delta=text,
            logprobs=[],
        )

    def _event(self, kind: str, **content: Any) -> str:
        number, self._number = self._number, self._number + 1
        body = {"type": f"response.{kind}", "sequence_number": number, **content}
        return chat_completions.event(body, body["type"])


def _earlier(body: Mapping[str, Any], reading: Reading) -> Sequence[Message]:
    name = body.get("previous_response_id")
    if name is None:
        return []
    earlier = reading.earlier(name) if isinstance(name, str) else None
    if earlier is None:
        raise invalid(f"previous_response_id {name!r:.50} is no answer of this session")
    return earlier


def _messages(given: Any) -> list[Message]:
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    if not isinstance(given, list) or not given:
        raise invalid("input must be a text or a list of at least one item")
    messages: list[Message] = []
    calling, thought = False, ""
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise invalid(f"{where} must be an object")
        kind = item.get("type", "message")
        if kind == "function_call":
            call = chat_request.call_of(
                where, item.get("call_id"), item.get("name"), item.get("arguments")
            )
            # Calls of one answer come as items of their own, after its text.
            if not calling:
                messages.append(chat_request.assistant("", [], thought))
            messages[-1].setdefault("tool_calls", []).append(call)
            calling, thought = True, ""
            continue
        if kind == "reasoning":
            thought, calling = _thought(where, item), False
            continue
        if kind == "function_call_output":
            output = chat_request.text_of(item.get("output"), f"{where}.output", _TEXTS, "\n")
            call_id = str(item.get("call_id", ""))
            messages.append(Message(role="tool", content=output, tool_call_id=call_id))
        elif kind == "message" and item.get("role") in _ROLES:
            text = chat_request.text_of(item.get("content"), f"{where}.content", _TEXTS)
            role = "system" if item["role"] == "developer" else str(item["role"])
            if role == "assistant":
                messages.append(chat_request.assistant(text, [], thought))
            else:
                messages.append(Message(role=role, content=text))
        else:
            raise invalid(
                f"{where} must be a message of {', '.join(_ROLES)}, a function_call or a "
                "function_call_output"
            )
        calling = messages[-1]["role"] == "assistant"
        if thought and not calling:
            raise invalid(f"{where} stands after reasoning, and is not the assistant's")
        thought = ""
    if thought:
        raise invalid("input ends with reasoning: the answer cannot go on with it")
    return messages


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """Reasoning of the message or the calls after it."""
    text = chat_request.text_of(item.get("content") or "", f"{where}.content", ("reasoning_text",))
    if not text and (item.get("summary") or item.get("encrypted_content")):
        raise invalid(f"{where} has no reasoning_text, and nothing else of it can be read")
    return text


def _schema(number: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise invalid(f"tools[{number}] is a {kind!r:.50}: only functions of the caller are called")
    about = {
        key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None
    }
    return {"type": "function", "function": about}


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    given = body.get(key) or []
    if not isinstance(given, list):
        raise invalid(f"{key} must be a list")
    return given


def _items(name: str, answer: Answer) -> list[dict[str, Any]]:
    """The output: a message where there is text, and calls."""
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    text, calls = answer.message["content"], answer.message.get("tool_calls", ())
    items = [_message_item(name, text, status)] if text.strip() or not calls else []
    for number, call in enumerate(calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}-{number}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": chat_request.arguments_text(call),
                "status": "completed",
            }
        )
    return items


def _message_item(name: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": f"msg_{name}",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def _whole(
    request: ChatRequest, name: str, answer: Answer | None, items: list[dict[str, Any]]
) -> dict[str, Any]:
    """The response; without an answer one that has begun."""
    status, why, usage = "in_progress", None, None
    if answer is not None:
        cut = answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        why = {"reason": "max_output_tokens"} if cut else None
        prompt, sampled = len(answer.prompt), len(answer.completion.tokens)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
    repeated = {**request.body}
    repeated["tool_choice"] = repeated.get("tool_choice") or "auto"
    repeated["tools"] = repeated.get("tools") or []
    return {
        "id": ID + name,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": why,
        "model": request.model,
        "output": items,
        "parallel_tool_calls": True,
        "usage": usage,
        **repeated,
    }
