"""OpenAI's chat completions as JSON: what of a request counts, and the replies.

Sampling is the run's: an agent is trained on what its policy samples at `rollout.temperature`, so a
request's own temperature, top_p, seed and penalties count for nothing. A field that would change
the answer in a way that cannot be ignored is refused.
https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from earl_core.environments.base import FunctionCall, Message, ToolCall
from earl_core.environments.tools.toolbox import check_schema
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from earl_core.rollout.gateway.bodies import characters, check_encodable
from earl_core.rollout.gateway.refusals import invalid
from earl_core.rollout.gateway.session import Answer
from earl_core.system.errors import ConfigError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REFUSED = {
    "functions": "it is the older form of tools: name tools",
    "stop": "answers end at the model's end of turn and at rollout.stop: name strings there",
    "response_format": "answers are not constrained: ask for the format in a message",
    "logit_bias": "answers are sampled from the policy as it is",
}
_AROUND = 8
"""Characters that a template puts around a message, at least."""
_HARMLESS: dict[str, tuple[Any, ...]] = {"response_format": ({"type": "text"},)}


@dataclass(frozen=True)
class ChatRequest:
    """The parts of a request that count. token_ids, logprobs: whether the reply has them."""

    messages: list[Message]
    tools: Tools
    max_tokens: int | None
    model: str
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool

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
        return said + sum(beside) + len(self.tools.key)


def parse(body: Any) -> ChatRequest:
    """Raises `HTTPException` with the field that is wrong."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    for key, why in _REFUSED.items():
        if body.get(key) and body[key] not in _HARMLESS.get(key, ()):
            raise invalid(f"{key} is not supported: {why}")
    if body.get("n") not in (None, 1):
        raise invalid("n must be 1: a group's episodes are played side by side")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list of at least one message")
    options = body.get("stream_options")
    return ChatRequest(
        messages=[_message(number, message) for number, message in enumerate(messages)],
        tools=_tools(body),
        max_tokens=budget(body),
        model=str(body.get("model", "")),
        stream=bool(body.get("stream")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
    )


def reply(request: ChatRequest, answer: Answer, name: str) -> dict[str, Any]:
    """The body of a reply that is not streamed."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": _said(answer),
        "finish_reason": answer.finish_reason,
        "logprobs": logprobs(answer) if request.logprobs else None,
    }
    body = {**_head(request, name, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
    if request.token_ids:
        choice["token_ids"] = answer.completion.tokens
        choice["spans"] = spans(answer)
        body["prompt_token_ids"] = answer.prompt
    return body


class Chunks:
    """A reply as server-sent events: pieces of text, and what is known when the answer is whole:
    the rest of the text, calls of tools, log-probs, the reason of its end."""

    def __init__(self, request: ChatRequest, name: str) -> None:
        self._request = request
        self._head = _head(request, name, "chat.completion.chunk")
        self._begun: dict[str, Any] = {"role": "assistant"}

    def piece(self, text: str) -> str:
        """The event of the next piece."""
        return self._choice({"content": text})

    def end(self, answer: Answer, sent: str) -> Iterator[str]:
        """The last events. sent: the text of all pieces."""
        delta = _said(answer)
        del delta["role"]
        content = delta.pop("content")
        delta["content"] = content and content[len(sent) :]
        for index, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = index
        yield self._choice(delta, values=logprobs(answer) if self._request.logprobs else None)
        yield self._choice({}, answer.finish_reason)
        if self._request.usage:
            yield _event({**self._head, "choices": [], "usage": _usage(answer)})
        yield "data: [DONE]\n\n"

    def error(self, body: dict[str, Any]) -> str:
        """The event of a refusal after the first piece. body: as `error_body` makes it."""
        return _event(body)

    def _choice(
        self,
        delta: dict[str, Any],
        reason: str | None = None,
        values: dict[str, Any] | None = None,
    ) -> str:
        if reason is None:
            delta, self._begun = self._begun | delta, {}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        if values is not None:
            choice["logprobs"] = values
        return _event({**self._head, "choices": [choice]})


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """The body of a refusal, as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _message(number: int, message: Any) -> Message:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise invalid(f"{where} must be an object with one of the roles {', '.join(_ROLES)}")
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise invalid(f"{where}.tool_calls must be a list")
    calls = [_call(where, each) for each in given]
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise invalid(f"{where}.content has a part that is no text")
        content = "".join(str(text) for text in texts)
    if not isinstance(content, str):
        raise invalid(f"{where}.content must be a text")
    role = "system" if message["role"] == "developer" else str(message["role"])
    read: Message = {"role": role, "content": content.strip() if role == "assistant" else content}
    if calls:
        read["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            read[key] = message[key]
    return read


def _call(where: str, call: Any) -> ToolCall:
    """Arguments come as a text of JSON; templates want them as they are."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise invalid(f"{where}.tool_calls has a call without function.name")
    try:
        given = function.get("arguments") or "{}"
        arguments = json.loads(given)
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.tool_calls: the arguments of {name!r:.50} are no JSON object")
    if "\\u" in given:
        check_encodable(arguments, f"{where}.tool_calls: the arguments of {name[:50]}")
    read: FunctionCall = {"name": name, "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": read}


def _tools(body: Mapping[str, Any]) -> Tools:
    choice = body.get("tool_choice", "auto")
    given = body.get("tools") or []
    if choice not in ("auto", "none", None):
        raise invalid("tool_choice must be auto or none: answers are not constrained")
    if not isinstance(given, list):
        raise invalid("tools must be a list")
    try:
        for schema in given:
            check_schema(schema)
    except ConfigError as error:
        raise invalid(str(error)) from error
    return NO_TOOLS if choice == "none" else Tools(given)


def _said(answer: Answer) -> dict[str, Any]:
    """The answer as OpenAI's API has it: arguments of calls are a text of JSON."""
    message: dict[str, Any] = {**answer.message}
    if "tool_calls" in message:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}
            for call in message["tool_calls"]
            for arguments in [call["function"]["arguments"]]
        ]
    return message


def budget(body: Mapping[str, Any]) -> int | None:
    """The limit of the answer's tokens. Raises `HTTPException`."""
    given = body.get("max_completion_tokens") or body.get("max_tokens")
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise invalid(f"max_tokens must be a whole number above 0, not {given!r:.50}")
    return given


def _head(request: ChatRequest, name: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{name}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = len(answer.prompt), len(answer.completion.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


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


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
