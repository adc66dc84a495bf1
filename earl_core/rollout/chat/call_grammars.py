"""Grammars of answers that call tools, for each format of `tool_calls.FORMATS` that has one.

They are parts of xgrammar's structural tags, and write calls as the families' templates do. The
arguments follow the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from earl_core.rollout.chat.chat import ChatTokenizer

Part = dict[str, Any]
"""A part of a structural tag."""


@dataclass(frozen=True)
class CallForm:
    """How calls are written. begin: before the arguments, with the tool's name in the place of
    `NAME`. end: after them. opens: with which the parser takes a call to begin, amid other text;
    "": where the answer begins with one. style: of the arguments. before, after: around all calls.
    between: two of them; None: there is one call at most."""

    begin: str
    end: str
    opens: str = ""
    style: str = "json"
    before: str = ""
    after: str = ""
    between: str | None = None

    def calls(self, tools: Sequence[Mapping[str, Any]], single: bool) -> Part:
        """Calls of these tools and nothing else, at least one. single: no more."""
        calls = {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in tools],
            "separator": self.between or "",
            "at_least_one": True,
            "stop_after_first": single or self.between is None,
        }
        around = [text(self.before), calls, text(self.after)]
        return sequence(*[each for each in around if each != text("")])

    def among(self, tools: Sequence[Mapping[str, Any]], single: bool) -> Part:
        """Any text; what begins a call is a call of one of these tools. single: the answer ends
        after the first."""
        if not self.opens:
            uncalled = {"type": "optional", "content": sequence(pattern(_NO_JSON), _NO_SIGN)}
            return either(self.calls(tools, single), uncalled)
        tags = [self._tag(tool) for tool in tools]
        for tag in tags:
            _, opens, rest = (self.before + tag["begin"]).partition(self.opens)
            tag["begin"], tag["end"] = opens + rest, tag["end"] + self.after
        return {
            "type": "triggered_tags",
            "triggers": [self.opens],
            "tags": tags,
            "stop_after_first": single,
        }

    def _tag(self, tool: Mapping[str, Any]) -> Part:
        function = tool["function"]
        name = function["name"]
        begin, _, rest = self.begin.partition("NAME")
        arguments = schema({"type": "object", **(function.get("parameters") or {})})
        if self.style != "json":
            # Of white space around a value one new line is not read as part of it.
            arguments["max_whitespace_cnt"] = 1
        written = json.dumps(name)[1:-1] if begin.endswith('"') else name
        return {
            "type": "tag",
            "begin": f"{begin}{written}{rest}",
            "content": {**arguments, "style": self.style},
            "end": self.end,
        }


CALL_FORMS: dict[str, CallForm] = {
    "hermes": CallForm(
        '<tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</tool_call>",
        opens="<tool_call>",
        between="\n",
    ),
    "qwen_xml": CallForm(
        "<tool_call>\n<function=NAME>\n",
        "\n</function>\n</tool_call>",
        opens="<function=",
        style="qwen_xml",
        between="\n",
    ),
    "llama3": CallForm('{"name": "NAME", "parameters": ', "}"),
    "mistral": CallForm(
        '{"name": "NAME", "arguments": ',
        "}",
        opens="[TOOL_CALLS]",
        before="[TOOL_CALLS][",
        after="]",
        between=", ",
    ),
    "mistral_named": CallForm("[TOOL_CALLS]NAME[ARGS]", "", opens="[TOOL_CALLS]", between=""),
    "deepseek": CallForm(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        opens="<｜tool▁call▁begin｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
        between="",
    ),
    "glm": CallForm(
        "<tool_call>NAME\n", "</tool_call>", opens="<tool_call>", style="glm_xml", between="\n"
    ),
    "phi4": CallForm(
        '{"name": "NAME", "arguments": ',
        "}",
        opens="<|tool_call|>",
        before="<|tool_call|>[",
        after="]<|/tool_call|>",
        between=", ",
    ),
    "json": CallForm('{"name": "NAME", "arguments": ', "}"),
}
"""By the name of the format. Gemma 4 writes texts between tokens of its own, which the library's
grammars of schemas do not."""


_NO_JSON = r"\s*([^\s\[{`<]|<[^\s|])"
"""How an answer begins that is no call of a format whose calls are whole answers."""
_NO_SIGN = {"type": "any_text", "excludes": ["<|python_tag|>"]}
"""The rest of it: that sign begins a call of Llama 3 anywhere."""


def check_call_form(chat: ChatTokenizer) -> None:
    """Raise `ConfigError` for a model whose calls cannot be masked."""
    if chat.knows_tools and chat.parser.name not in CALL_FORMS:
        raise ConfigError(
            f"rollout.requests.constrained is engine, and calls of the format {chat.parser.name} "
            "have no grammar",
            remedy="set it to free, or rollout.tool_format to one of " + ", ".join(CALL_FORMS),
        )


def text(value: str) -> Part:
    """This text."""
    return {"type": "const_string", "value": value}


def schema(given: Any) -> Part:
    """JSON of a schema."""
    return {"type": "json_schema", "json_schema": given}


def pattern(given: str) -> Part:
    """The whole text of a regular expression."""
    return {"type": "regex", "pattern": given}


def sequence(*parts: Part) -> Part:
    """One after the other."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(*parts: Part) -> Part:
    """One of them."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def after_reasoning(part: Part, begun: bool) -> Part:
    """The part after reasoning between `<think>` and `</think>`. begun: the prompt ends with the
    former; else there may be none."""
    thought = {
        "type": "tag",
        "begin": "" if begun else "<think>",
        "content": {"type": "any_text"},
        "end": "</think>",
    }
    reasoned = sequence(thought, pattern(r"\n{0,2}"))
    return sequence(reasoned if begun else {"type": "optional", "content": reasoned}, part)
