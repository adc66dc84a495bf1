"""The form that a request asks for as a grammar, where engines mask by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from earl_core.environments.base import Message
from earl_core.pretrained.grammars import GrammarError, Grammars
from earl_core.rollout.chat.call_grammars import CALL_FORMS, Part, after_reasoning, either
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.rollout.gateway.constraints import Constraint
from earl_core.rollout.gateway.refusals import invalid
from earl_core.system.errors import ConfigError
from earl_core.trajectory.forms import Form

_COMPILING = ThreadPoolExecutor(2, "grammars")
"""Compiles: a grammar may take seconds, and the event loop has others to answer."""

_COMPILE_SECONDS = 30.0
_MOST_CHARACTERS = 1 << 17
_THOUGHT = 16
"""Tokens at the end of a prompt among which it may begin reasoning."""

_NOT_EXPRESSED = (
    *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "not", "if"),
    *("$dynamicRef", "$recursiveRef"),
)
"""Keywords of schemas that the library passes over: what it lets through may lack the form."""

_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords beside which it passes over others."""
_SAYING_NOTHING = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "discriminator"),
)
_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
"""Of the first ones it heeds one."""
_OF_A_TYPE = (
    *_OF_TEXTS,
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
)
_TYPES = ("type", "properties", "items", "prefixItems", "enum", "const")
"""Keywords without one of which it passes over those."""
_FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
"""That it has grammars of."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")


class Forms:
    """Of a gateway. grammars: makes those of the model; they are the engine's and the trainer's,
    too."""

    def __init__(self, chat: ChatTokenizer, grammars: Callable[[], Grammars]) -> None:
        self._chat, self._grammars = chat, grammars

    async def of(
        self,
        constraints: Sequence[Constraint],
        tools: Tools,
        prompt: Sequence[int],
        stops: tuple[int, ...],
    ) -> Form:
        """The form of an answer. prompt: the tokens before it. stops: that end it. Raises
        `HTTPException` for one that cannot be masked."""
        field = constraints[0].field
        part, thought = self._part(constraints, tools), ""
        begins = _beginnings(part)
        said = self._chat.raw_text_of(prompt[-_THOUGHT:]).rstrip()
        if said.endswith("<think>"):
            part, thought = after_reasoning(part, True), "</think>"
        elif self._chat.reasons and not said.endswith("</think>"):
            part, thought = after_reasoning(part, False), "<think></think>"
        grammar = json.dumps({"type": "structural_tag", "format": part})
        if len(grammar) > _MOST_CHARACTERS:
            raise _unmasked(field, f"its grammar has over {_MOST_CHARACTERS:,} characters")
        form = Form(grammar, stops)
        beginnings = tuple(thought + each for each in begins)
        compiling = asyncio.get_running_loop().run_in_executor(
            _COMPILING, lambda: self._grammars().check(form, beginnings)
        )
        try:
            await asyncio.wait_for(compiling, _COMPILE_SECONDS)
        except GrammarError as error:
            raise _unmasked(field, str(error)) from error
        except TimeoutError:
            told = f"its grammar takes over {_COMPILE_SECONDS:g} s to compile and to be tried"
            raise _unmasked(field, told) from None
        return form

    def _part(self, constraints: Sequence[Constraint], tools: Tools) -> Part:
        shapes = [each for each in constraints if each.shape is not None]
        if len(shapes) > 1:
            fields = " and ".join(each.field for each in shapes)
            raise invalid(f"{fields} each ask for a form of the text: ask for one")
        for each in shapes:
            _check(each.field, (each.shape or {}).get("json_schema"))
        of_calls = [each for each in constraints if each.shape is None]
        needed = any(each.needed for each in of_calls)
        if shapes and not needed and not tools:
            return dict(shapes[0].shape or {})
        calls = self._calls(constraints[0].field, of_calls, tools, needed or bool(shapes))
        return either(dict(shapes[0].shape or {}), calls) if shapes and not needed else calls

    def _calls(
        self, field: str, constraints: Sequence[Constraint], tools: Tools, only: bool
    ) -> Part:
        """only: nothing but calls."""
        try:
            name = self._chat.parser.name
        except ConfigError as error:
            raise _unmasked(field, str(error)) from error
        written = CALL_FORMS.get(name)
        if written is None:
            raise _unmasked(field, f"calls of the format {name} have no grammar")
        named = [each for each in constraints if each.names]
        called = [
            tool
            for tool in tools.schemas
            if all(tool["function"]["name"] in each.names for each in named)
        ]
        for tool in called:
            _check(f"the tool {tool['function']['name']}", tool["function"].get("parameters"))
        single = any(each.single for each in constraints)
        return written.calls(called, single) if only else written.among(called, single)


def _check(field: str, schema: Any) -> None:
    """Raise `HTTPException` for a schema with keywords that grammars do not express."""
    for each in _schemas(schema):
        if found := next(filter(each.__contains__, _NOT_EXPRESSED), None):
            raise _unmasked(field, f"{found!r} in a schema has no grammar")
        if (form := each.get("format")) not in (None, *_FORMATS):
            raise _unmasked(field, f"the format {form!r:.50} in a schema has no grammar")
        if not str(each.get("$ref", "#")).startswith("#"):
            raise _unmasked(field, f"{each['$ref']!r:.100} refers to what is not in the schema")
        if isinstance(each.get("allOf"), list) and len(each["allOf"]) > 1:
            raise _unmasked(field, "'allOf' of several schemas has no grammar")
        for alone in _ALONE:
            others = each.keys() - {alone, *_SAYING_NOTHING}
            if alone in each and others:
                raise _unmasked(field, f"{min(others)!r} beside {alone!r} has no grammar")
        if each.get("required") and not each.get("properties"):
            raise _unmasked(field, "'required' without 'properties' has no grammar")
        if not each.keys() & set(_TYPES) and (bare := each.keys() & set(_OF_A_TYPE)):
            raise _unmasked(field, f"{min(bare)!r} without 'type' has no grammar")
        bounds = [key for key in _OF_TEXTS if key in each]
        if len(bounds) > 1 and bounds != ["minLength", "maxLength"]:
            raise _unmasked(field, f"{bounds[0]!r} beside {bounds[1]!r} has no grammar")


def _schemas(part: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all within it."""
    if isinstance(part, Mapping):
        yield part
        for key, value in part.items():
            if key in _NAMED and isinstance(value, Mapping):
                for each in value.values():
                    yield from _schemas(each)
            elif key not in _VALUES:
                yield from _schemas(value)
    elif isinstance(part, list):
        for each in part:
            yield from _schemas(each)


def _beginnings(part: Part) -> list[str]:
    """After which answers are tried: of each call, as free text before it goes on for long."""
    calls = part["elements"][0] if part["type"] == "or" else part
    return [each["begin"] for each in calls.get("tags", ())] or [""]


def _unmasked(field: str, why: str) -> Exception:
    return invalid(
        f"{field} cannot be masked, as rollout.requests.constrained: engine has it: {why}. Ask for "
        "another form, or set it to free"
    )


def without_reasoning(
    message: Message, constraints: Sequence[Constraint]
) -> tuple[Message, str | None]:
    """An answer that was held to the constraints without the reasoning before the text that one of
    them is about, for clients that read this text; and the reasoning, None where there is none."""
    thought, ends, text = message["content"].partition("</think>")
    if not ends or "tool_calls" in message or all(each.shape is None for each in constraints):
        return message, None
    return {**message, "content": text.lstrip("\n")}, thought.removeprefix("<think>").strip("\n")
