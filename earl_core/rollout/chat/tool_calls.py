"""Forms in which models write calls of tools: a format for each family, and its parsing.

A format is a *response template*, the declarative form in which transformers parses answers and in
which newer tokenizers bring theirs along (`tokenizer.response_template`). Reasoning in front of
`</think>` holds no calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from earl_core.environments.base import FunctionCall, Message, ToolCall
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

FORMATS: dict[str, dict[str, Any]] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen, SmolLM3, EXAONE
    "hermes": {"open": "<tool_call>", "close": "</tool_call>", "content": "json"},
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen coder
    "qwen_xml": {
        "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>(?:\s*</tool_call>)?",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
        "transform": _NAMED,
    },
    # {"name": ..., "parameters": {...}}, the whole answer: Llama 3
    "llama3": {
        "open_pattern": r'(?:<\|python_tag\|>|\A\s*(?=\{\s*"(?:name|type|function)"))',
        "content": "json",
    },
    # [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]: Mistral until 2024
    "mistral": {"open": "[TOOL_CALLS]", "content": "json"},
    # [TOOL_CALLS]NAME[ARGS]{...}: Mistral since
    "mistral_named": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]+)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "content": "json",
        "transform": _NAMED,
    },
    # <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>: DeepSeek V3.1; V3 has a type
    # in front, and a Markdown block around the arguments
    "deepseek": {
        "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>"
        r"(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+)"
        r"(?:<｜tool▁sep｜>|\n```json\n)",
        "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>\n?(?:<｜tool▁calls▁end｜>)?",
        "content": "json",
        "transform": _NAMED,
    },
    # <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>: GLM 4.5
    "glm": {
        "open_pattern": r"<tool_call>\s*(?P<name>[^\n<]+)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*"
            r"<arg_value>(?P<value>.*?)</arg_value>"
        },
        "transform": _NAMED,
    },
    # <|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>: Gemma 4
    "gemma4": {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": _NAMED,
    },
    # <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>: Phi 4 mini
    "phi4": {"open": "<|tool_call|>", "close": "<|/tool_call|>", "content": "json"},
    # {"name": ..., "arguments": {...}} or a list of such, the whole answer, fenced or not
    "json": {
        "open_pattern": r'\A\s*(?:```(?:json)?\s*)?(?=[\[{]\s*\{?\s*"name")',
        "close_pattern": r"\s*```",
        "content": "json",
    },
}
"""Formats by name: the part `tool_calls` of a response template."""

_SIGNS = {
    "<function=": "qwen_xml",
    "<arg_key>": "glm",
    "<｜tool▁call▁begin｜>": "deepseek",
    "[ARGS]": "mistral_named",
    "[TOOL_CALLS]": "mistral",
    "<|tool_call>": "gemma4",
    "<|tool_call|>": "phi4",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    '"parameters": ': "llama3",
}
"""Texts that a chat template holds, the more telling first, and the format each means."""


@dataclass(frozen=True)
class Tools:
    """Tools that a conversation's model may call, and what else its chat template is told.

    schemas: as OpenAI's API has them. options: variables of the template by name, which go before
    the run's own.
    """

    schemas: Sequence[dict[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        key = json.dumps(self.schemas) if self.schemas else ""
        if self.options:
            key += json.dumps(self.options, sort_keys=True)
        object.__setattr__(self, "key", key)

    def __bool__(self) -> bool:
        return bool(self.schemas)


NO_TOOLS = Tools()


@dataclass(frozen=True)
class Answer:
    """An answer of the model. text: without special tokens. raw: with them, but for the end of the
    turn; the same where there are no tools. calls: of tools. error: why what looks like calls is
    none. stopped_by: the string before which its texts were cut."""

    text: str
    raw: str
    calls: Sequence[FunctionCall] = ()
    error: str = ""
    stopped_by: str = ""

    def message(self, ids: Sequence[str]) -> Message:
        """Make the message. ids: of its calls."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                ToolCall(id=own, type="function", function=call)
                for own, call in zip(ids, self.calls, strict=True)
            ]
        return message


class ToolParser:
    """Finds the calls in a model's answers. template: a response template. name: of `FORMATS`, or
    what the format is called where it is none of them."""

    def __init__(self, template: Mapping[str, Any], name: str) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._template = load_response_template(dict(template))
            self.name = name
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"the tokenizer's response_template cannot be used: {error}",
                remedy=f"set rollout.tool_format to one of {', '.join(FORMATS)}",
            ) from error

    def parse(self, raw: str, tools: Tools) -> tuple[str, list[FunctionCall]]:
        """The text beside the calls, and the calls. Raises `ValueError` where calls are begun but
        cannot be read."""
        from transformers.utils.chat_parsing import parse_response

        _, _, said = raw.rpartition("</think>")
        if "<think>" in said:
            return raw, []
        try:
            message = parse_response(said, self._template, prefix="", tools=list(tools.schemas))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        return str(message.get("content", "")), _calls(message.get("tool_calls", []))


def parser_of(
    tokenizer: PreTrainedTokenizerBase, template: str, name: str, knows_tools: bool = False
) -> ToolParser:
    """The parser for a model. template: the source of its chat template. name: of `FORMATS`, or
    auto. knows_tools: whether the template tells the model of tools in a form of its own.

    Raises `ConfigError` where that form is none of `FORMATS`."""
    own = getattr(tokenizer, "response_template", None)
    if name == "auto" and own:
        return ToolParser(own, "that the tokenizer brings along")
    if name == "auto":
        found = next((form for sign, form in _SIGNS.items() if sign in template), None)
        if found is None and knows_tools:
            raise ConfigError(
                "the chat template knows tools, but not in a form that is known here",
                remedy=f"set rollout.tool_format to one of {', '.join(FORMATS)}",
            )
        name = found or "hermes"
    calls = {"repeats": True, "transform": "{content}"} | FORMATS[name]
    fields = {"tool_calls": calls, "content": {"content": "text"}}
    return ToolParser({"start_anchor": "<", "fields": fields}, name)


def _calls(found: Any) -> list[FunctionCall]:
    if isinstance(found, list):
        return [call for each in found for call in _calls(each)]
    function = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(function, dict):
        raise ValueError("a call is a JSON object with name and arguments")
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name:
        raise ValueError("a call must say the name of a tool")
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be a JSON object")
    try:
        json.dumps([name, arguments], allow_nan=False).encode()
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(str(error)) from error
    return [{"name": name, "arguments": arguments}]


_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

WRITTEN = f"{_PROMPT}<tool_response></tool_response>"
"""All that stands around texts of others below."""


def in_words(messages: Sequence[Message], tools: Tools, system: bool) -> list[Message]:
    """The conversation with roles and texts alone.

    system: whether the template knows system messages; else the first user's is the longer.
    """
    said: list[Message] = []
    for number, message in enumerate(messages):
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if number and messages[number - 1]["role"] == "tool":
                said[-1]["content"] += f"\n{text}"
                continue
        for call in message.get("tool_calls", ()):
            written = json.dumps(call["function"], ensure_ascii=False)
            text += ("\n" if text else "") + f"<tool_call>\n{written}\n</tool_call>"
        said.append({"role": role, "content": text})
    if not tools:
        return said
    schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in tools.schemas)
    prompt = _PROMPT.format(schemas=schemas)
    if said and said[0]["role"] == ("system" if system else "user"):
        first = said[0]["content"]
        told = f"{first}\n\n{prompt}" if system else f"{prompt}\n\n{first}"
        return [{"role": said[0]["role"], "content": told}, *said[1:]]
    return [{"role": "system" if system else "user", "content": prompt}, *said]
