"""OpenAI's chat completions as JSON: what of a request counts, and the replies.

Sampling is the run's: an agent is trained on what its policy samples at `rollout.temperature`, so a
request's own temperature, top_p, seed and penalties count for nothing. `fields` has the rest.
https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from earl_core.environments.base import Message, ToolCall
from earl_core.rollout.chat.token_texts import TokenText
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.rollout.gateway import chat_request, constraints
from earl_core.rollout.gateway.call import Answer
from earl_core.rollout.gateway.chat_request import ChatRequest, Reading
from earl_core.rollout.gateway.constraints import Constraint
from earl_core.rollout.gateway.fields import CHAT, check
from earl_core.rollout.gateway.refusals import invalid

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_READ = {
    "function_call": "it is the older form of tool_calls",
    "audio": "prompts and answers are text",
    "refusal": "write it as content",
    **dict.fromkeys(("prefix", "partial"), "ask for continue_final_message: true"),
    **dict.fromkeys(
        ("thinking", "thinking_blocks", "reasoning_details"), "write it as reasoning_content"
    ),
}
"""Parts of a message that would change the prompt."""
_MOST_TOP = 20
"""As OpenAI and vLLM have it."""
_LEAST = -9999.0
"""In the place of what JSON has no number for, as OpenAI has it."""
MOST_ANSWERS = 128
"""Of one request, as OpenAI has it."""


def parse(body: Any, reading: Reading) -> ChatRequest:
    """Raises `HTTPException` with the field that is wrong."""
    body = chat_request.json_object(body)
    check(body, CHAT)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages must be a list of at least one message")
    messages = [_message(number, message) for number, message in enumerate(given)]
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise invalid("stream_options must be a JSON object")
    tools, asked = tools_and_choice(body, chat_request.schemas(body.get("tools") or []))
    asked += _form(body)
    opening = _opening(body, messages)
    constraints.check(asked, reading.constrained, opening)
    return ChatRequest(
        messages=messages,
        opening=opening,
        tools=Tools(tools, _template_options(body, reading)),
        max_tokens=budget(body),
        model=str(body.get("model", "")),
        stream=chat_request.flag(body, "stream") or False,
        count=chat_request.whole_number(body, "n", 1, MOST_ANSWERS) or 1,
        stop_token_ids=chat_request.token_ids(body, "stop_token_ids", reading.vocabulary),
        stop=chat_request.stop_strings(body, "stop"),
        constraints=asked,
        usage=chat_request.flag(options, "include_usage", "stream_options.") or False,
        logprobs=chat_request.flag(body, "logprobs") or False,
        top=_top(body),
        ids_as_text=chat_request.flag(body, "return_tokens_as_token_ids") or False,
        token_ids=chat_request.flag(body, "return_token_ids") or False,
    )


def reply(request: ChatRequest, answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """The body of a reply that is not streamed."""
    body = {
        **_head(request, name, "chat.completion"),
        "choices": [_choice(request, *each) for each in enumerate(answers)],
        "usage": _usage(answers),
    }
    if request.token_ids:
        body["prompt_token_ids"] = answers[0].prompt
    return body


class Chunks:
    """A reply as server-sent events: pieces of text, and what is known when the answer is whole:
    the rest of the text, calls of tools, log-probs, the reason of its end."""

    def __init__(self, request: ChatRequest, name: str) -> None:
        self._request = request
        self._head = _head(request, name, "chat.completion.chunk")
        self._begun = False

    def piece(self, text: str) -> str:
        """The event of the next piece."""
        return self._choice({"content": text})

    def end(self, answers: Sequence[Answer], sent: str) -> Iterator[str]:
        """The last events. sent: the text of all pieces."""
        for number, answer in enumerate(answers):
            delta = _said(answer)
            del delta["role"]
            content = delta.pop("content")
            delta["content"] = content and content[len(sent) :]
            for index, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = index
            values = _logprobs(self._request, answer) if self._request.logprobs else None
            yield self._choice(delta, number, values=values)
            yield self._choice({}, number, answer.finish_reason)
            self._begun = False
        if self._request.usage:
            yield event({**self._head, "choices": [], "usage": _usage(answers)})
        yield "data: [DONE]\n\n"

    def error(self, body: dict[str, Any]) -> str:
        """The event of a refusal after the first piece. body: as `error_body` makes it."""
        return event(body)

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """As the module's."""
        return error_body(status, code, message)

    def _choice(
        self,
        delta: dict[str, Any],
        index: int = 0,
        reason: str | None = None,
        values: dict[str, Any] | None = None,
    ) -> str:
        if reason is None and not self._begun:
            delta, self._begun = {"role": "assistant", **delta}, True
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if values is not None:
            choice["logprobs"] = values
        return event({**self._head, "choices": [choice]})


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """The body of a refusal, as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def budget(body: Mapping[str, Any]) -> int | None:
    """The limit of the answer's tokens. Raises `HTTPException`."""
    limits = [
        chat_request.whole_number(body, key, 1) for key in ("max_completion_tokens", "max_tokens")
    ]
    return next((limit for limit in limits if limit is not None), None)


def tools_and_choice(
    body: Mapping[str, Any], given: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[Constraint]]:
    """The tools that the model is told of, and what `tool_choice` and `parallel_tool_calls` ask
    for. Raises `HTTPException`."""
    choice, names = body.get("tool_choice"), chat_request.names_of(given)
    asked: list[Constraint] = []
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind == "none":
        given = []
    elif kind == "required":
        asked = [constraints.calls("tool_choice", names)]
    elif isinstance(choice, Mapping) and kind == "function":
        asked = [constraints.calls("tool_choice", _known([choice], names))]
    elif isinstance(choice, Mapping) and kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        among = _known(allowed.get("tools") or [], names)
        needed = allowed.get("mode") == "required"
        form = constraints.calls if needed else constraints.calls_among
        asked = [form("tool_choice", among)]
    elif kind not in (None, "auto"):
        raise invalid("tool_choice must be auto, none, required, a function or allowed_tools")
    if asked and not given:
        raise invalid("tool_choice asks for a call, and tools has none")
    if chat_request.flag(body, "parallel_tool_calls") is False and given:
        asked.append(constraints.one_call("parallel_tool_calls"))
    return given, asked


def logprobs(answer: Answer) -> dict[str, Any]:
    """A token's text is its id, as vLLM's `return_tokens_as_token_ids` says it."""
    pairs = zip(answer.completion.tokens, answer.completion.logprobs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in pairs
    ]
    return {"content": content, "refusal": None}


def spans(answer: Answer) -> list[dict[str, int]]:
    """List the policy versions, each with the tokens that it sampled."""
    return [span._asdict() for span in answer.completion.spans]


def event(body: Mapping[str, Any], name: str = "") -> str:
    """A server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(body)}\n\n"


def _message(number: int, message: Any) -> Message:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise invalid(f"{where} must be an object with one of the roles {', '.join(_ROLES)}")
    for key, instead in _NOT_READ.items():
        if message.get(key):
            raise invalid(f"{where}.{key} is not supported: {instead}")
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise invalid(f"{where}.tool_calls must be a list")
    calls = [_call(f"{where}.tool_calls", each) for each in given]
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    text, reasoning = chat_request.text_of(content, f"{where}.content"), _reasoning(message, where)
    if message["role"] == "assistant":
        read = chat_request.assistant(text, calls, reasoning)
    elif reasoning:
        raise invalid(f"{where} has reasoning, and is not the assistant's")
    else:
        role = "system" if message["role"] == "developer" else str(message["role"])
        read = Message(role=role, content=text)
        if calls:
            read["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if not isinstance(message.get(key), str | None):
            raise invalid(f"{where}.{key} must be a text")
    if message.get("tool_call_id") is not None:
        read["tool_call_id"] = message["tool_call_id"]
    if message.get("name") is not None:
        read["name"] = message["name"]
    return read


def _reasoning(message: Mapping[str, Any], where: str) -> str:
    """By the name that DeepSeek gave it, or vLLM's."""
    given = {key: message.get(key) or "" for key in ("reasoning_content", "reasoning")}
    for key, value in given.items():
        if not isinstance(value, str):
            raise invalid(f"{where}.{key} must be a text")
    one, other = given.values()
    if one and other and one != other:
        raise invalid(
            f"{where} has two kinds of reasoning: leave reasoning_content or reasoning out"
        )
    return one or other


def _call(where: str, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise invalid(f"{where} has a call without a function")
    name, arguments = function.get("name"), function.get("arguments")
    return chat_request.call_of(where, call.get("id"), name, arguments)


def _opening(body: Mapping[str, Any], messages: list[Message]) -> str:
    """The text of the last message where the answer goes on with it, which then is no message
    before it."""
    begins = chat_request.flag(body, "add_generation_prompt")
    if not chat_request.flag(body, "continue_final_message"):
        if begins is False:
            raise invalid(
                "add_generation_prompt: false leaves open whose turn it is: name "
                "continue_final_message: true to have the answer go on with the last message"
            )
        return ""
    if begins:
        raise invalid("continue_final_message and add_generation_prompt exclude each other")
    last = body["messages"][-1]
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        raise invalid("continue_final_message wants a last message that is the assistant's text")
    if "reasoning_content" in messages.pop():
        raise invalid("the answer cannot go on with a message that has reasoning beside its text")
    return chat_request.text_of(last.get("content") or "", "the last message's content")


def _template_options(body: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    given = body.get("chat_template_kwargs") or {}
    options = chat_request.template_options(given, reading, "chat_template_kwargs")
    return chat_request.effort(body.get("reasoning_effort"), reading, "reasoning_effort") | options


def _form(body: Mapping[str, Any]) -> list[Constraint]:
    asked = constraints.of_format("response_format", body.get("response_format"))
    given = body.get("structured_outputs") or {}
    if not isinstance(given, Mapping):
        raise invalid("structured_outputs must be a JSON object")
    for key, value in given.items():
        if value in (None, False):
            continue
        if key not in _FORMS:
            raise invalid(f"structured_outputs.{key} is not supported: ask for {', '.join(_FORMS)}")
        asked.append(_FORMS[key](f"structured_outputs.{key}", value))
    for key in ("json", "choice", "regex"):
        if body.get(f"guided_{key}"):
            asked.append(_FORMS[key](f"guided_{key}", body[f"guided_{key}"]))
    return asked


_FORMS = {
    "json": constraints.of_schema,
    "json_object": lambda field, _: constraints.of_format(field, "json_object")[0],
    "choice": constraints.of_choice,
    "regex": constraints.of_pattern,
}


def _known(given: Any, names: Sequence[str]) -> list[str]:
    """The names of tools that a choice names."""
    found = []
    for each in given if isinstance(given, list) else [given]:
        function = each.get("function", each) if isinstance(each, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in names:
            raise invalid(f"tool_choice names {name!r:.50}, and tools has no such function")
        found.append(name)
    return found


def _choice(request: ChatRequest, index: int, answer: Answer) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "message": _said(answer),
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(request, answer) if request.logprobs else None,
    }
    if request.token_ids:
        choice["token_ids"] = answer.completion.tokens
        choice["spans"] = spans(answer)
    return choice


def _said(answer: Answer) -> dict[str, Any]:
    """The answer as OpenAI's API has it: arguments of calls are a text of JSON."""
    message: dict[str, Any] = {**answer.message}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if "tool_calls" in message:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                **call,
                "function": {**call["function"], "arguments": chat_request.arguments_text(call)},
            }
            for call in message["tool_calls"]
        ]
    return message


def _head(request: ChatRequest, name: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{name}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = len(answers[0].prompt)
    sampled = sum(len(answer.completion.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _logprobs(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    if request.ids_as_text:
        return logprobs(answer)
    rows = zip(answer.texts, answer.completion.logprobs, strict=True)
    content = [{**_token(*row), "top_logprobs": []} for row in rows]
    for row, top in zip(content, answer.top, strict=False):
        row["top_logprobs"] = [_token(text, max(value, _LEAST)) for text, value in top]
    return {"content": content, "refusal": None}


def _token(token: TokenText, value: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": value, "bytes": list(token.content)}


def _top(body: Mapping[str, Any]) -> int:
    top = chat_request.whole_number(body, "top_logprobs", 0, _MOST_TOP) or 0
    if top and not body.get("logprobs"):
        raise invalid("top_logprobs wants logprobs: true")
    if top and body.get("return_tokens_as_token_ids"):
        raise invalid("top_logprobs and return_tokens_as_token_ids exclude each other")
    return top
