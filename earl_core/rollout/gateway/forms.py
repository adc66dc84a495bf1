"""The form that a request asks for as a grammar, where engines mask by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from earl_core.pretrained.grammars import GrammarError, Grammars
from earl_core.rollout.chat.call_grammars import CALL_FORMS, Part, after_reasoning, either
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.rollout.gateway.constraints import Constraint
from earl_core.rollout.gateway.refusals import invalid
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
)
"""Keywords of schemas that the library passes over: what it lets through may lack the form."""


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
        part = self._part(constraints, tools)
        said = self._chat.raw_text_of(prompt[-_THOUGHT:]).rstrip()
        if said.endswith("<think>"):
            part = after_reasoning(part, True)
        elif self._chat.reasons and not said.endswith("</think>"):
            part = after_reasoning(part, False)
        grammar = json.dumps({"type": "structural_tag", "format": part})
        if len(grammar) > _MOST_CHARACTERS:
            raise _unmasked(field, f"its grammar has over {_MOST_CHARACTERS:,} characters")
        form = Form(grammar, stops)
        compiling = asyncio.get_running_loop().run_in_executor(_COMPILING, self._try, form)
        try:
            await asyncio.wait_for(compiling, _COMPILE_SECONDS)
        except GrammarError as error:
            raise _unmasked(field, str(error)) from error
        except TimeoutError:
            told = f"its grammar takes over {_COMPILE_SECONDS:g} s to compile"
            raise _unmasked(field, told) from None
        return form

    def _try(self, form: Form) -> None:
        self._grammars().matcher(form).allowed()

    def _part(self, constraints: Sequence[Constraint], tools: Tools) -> Part:
        shapes = [each for each in constraints if each.shape is not None]
        if len(shapes) > 1:
            fields = " and ".join(each.field for each in shapes)
            raise invalid(f"{fields} each ask for a form of the text: ask for one")
        for each in shapes:
            _check(each.field, each.shape)
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
        written = CALL_FORMS.get(self._chat.parser.name)
        if written is None:
            raise _unmasked(field, f"calls of the format {self._chat.parser.name} have no grammar")
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


def _check(field: str, part: Any) -> None:
    """Raise `HTTPException` for a schema with a keyword that grammars do not express."""
    for keyword in _keywords(part):
        if keyword in _NOT_EXPRESSED:
            raise _unmasked(field, f"{keyword!r} in a schema has no grammar")


def _keywords(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        for key, value in part.items():
            if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
                for each in value.values():
                    yield from _keywords(each)
            elif key not in ("enum", "const", "default", "examples"):
                yield str(key)
                yield from _keywords(value)
    elif isinstance(part, list):
        for each in part:
            yield from _keywords(each)


def _unmasked(field: str, why: str) -> Exception:
    return invalid(
        f"{field} cannot be masked, as rollout.requests.constrained: engine has it: {why}. Ask for "
        "another form, or set it to free"
    )
