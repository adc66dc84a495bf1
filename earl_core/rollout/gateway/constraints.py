"""The form of an answer that a request asks for: a call, one call, JSON, a schema, a pattern.

Where answers are sampled freely, one that does not have the form goes back as it is, and the
framework asks again; where the engine masks (`forms`), one that is not cut has it. It is counted
whether they have it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from earl_core.environments.base import Message
from earl_core.environments.tools.arguments import ArgumentCheck, is_costly, misfit
from earl_core.rollout.chat import call_grammars
from earl_core.rollout.chat.call_grammars import Part
from earl_core.rollout.gateway.refusals import invalid
from earl_core.system.errors import EarlError

_CHECK = ArgumentCheck()
"""The check of this process."""

_THREAD = ThreadPoolExecutor(1, "constraints")
"""Asks it: checks come one after another anyway, and would keep the threads that others want."""

_MOST_SLOW = 2**10
_slow: set[str] = set()
"""Schemas whose check took too long once, as texts, or could not be had: no answer fits them."""


@dataclass(frozen=True)
class Constraint:
    """field: that asks for it. fits: whether an answer has the form; may take its time where it is
    costly. shape: of the text, as a part of a grammar; None: it is about calls: needed: there must
    be one; single: there must not be two; names: they are of these tools, of any if it is empty."""

    field: str
    fits: Callable[[Message], bool]
    costly: bool = False
    shape: Part | None = None
    needed: bool = False
    single: bool = False
    names: Collection[str] = ()

    async def satisfied(self, answer: Message) -> bool:
        """Tell whether an answer has the form."""
        if not self.costly:
            return self.fits(answer)
        return await asyncio.get_running_loop().run_in_executor(_THREAD, self.fits, answer)


def calls(field: str, names: Collection[str] = ()) -> Constraint:
    """A call of a tool, or of one of those."""

    def fits(answer: Message) -> bool:
        called = [call["function"]["name"] for call in answer.get("tool_calls", ())]
        return bool(called) and (not names or all(name in names for name in called))

    return Constraint(field, fits, needed=True, names=names)


def calls_among(field: str, names: Collection[str]) -> Constraint:
    """No call, or calls of these tools only."""
    needed = calls(field, names).fits

    def fits(answer: Message) -> bool:
        return "tool_calls" not in answer or needed(answer)

    return Constraint(field, fits, names=names)


def one_call(field: str) -> Constraint:
    """One call at most."""
    return Constraint(field, lambda answer: len(answer.get("tool_calls", ())) <= 1, single=True)


def of_format(field: str, given: Any) -> list[Constraint]:
    """OpenAI's formats: {"type": "text", "json_object" or "json_schema"}. Raises `HTTPException`
    for others."""
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind in (None, "text"):
        return []
    if kind == "json_object":
        shape = call_grammars.schema({"type": "object"})
        return [_text(field, lambda text: isinstance(json.loads(text), dict), shape)]
    if kind == "json_schema":
        within = given.get("json_schema", given)
        return [of_schema(field, within.get("schema") if isinstance(within, Mapping) else None)]
    raise invalid(f"{field}.type must be text, json_object or json_schema")


def of_schema(field: str, schema: Any) -> Constraint:
    """JSON of a schema. Raises `HTTPException` for what is none."""
    from jsonschema import Draft202012Validator, SchemaError

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            schema = None
    if not isinstance(schema, dict):
        raise invalid(f"{field} must have a JSON schema, an object")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise invalid(f"{field} is no JSON schema: {error.message:.300}") from None
    shape = call_grammars.schema(schema)
    if is_costly(schema):
        return _text(field, lambda text: _fits(field, schema, json.loads(text)), shape, True)
    return _text(field, lambda text: not misfit(schema, json.loads(text)), shape)


def of_choice(field: str, given: Any) -> Constraint:
    """One of several texts. Raises `HTTPException` for what are none."""
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise invalid(f"{field} must be a list of texts")
    shape = call_grammars.either(*map(call_grammars.text, given or [""]))
    return _text(field, lambda text: text in given, shape)


def of_pattern(field: str, given: Any) -> Constraint:
    """The whole text of a regular expression. Raises `HTTPException` for what is none."""
    try:
        re.compile(given)
    except (TypeError, re.error) as error:
        raise invalid(f"{field} is no regular expression: {error}") from None
    # Beside the event loop, and within bounds: a pattern may backtrack for ever.
    schema = {"type": "string", "pattern": f"^(?:{given})$"}
    shape = call_grammars.pattern(given)
    return _text(field, lambda text: _fits(field, schema, text), shape, True)


def _fits(field: str, schema: Mapping[str, Any], value: Any) -> bool:
    """Compare within bounds of time, which a schema may pass once."""
    key = json.dumps(schema, sort_keys=True)
    if key in _slow:
        return False
    try:
        return not _CHECK.misfit(field, schema, value)
    except EarlError:
        if len(_slow) == _MOST_SLOW:
            _slow.clear()
        _slow.add(key)
        return False


def check(constraints: Sequence[Constraint], how: str, opening: str = "") -> None:
    """Raise `HTTPException` for constraints where `rollout.requests.constrained` refuses them, and
    where the engine is to mask an answer that goes on after its opening."""
    if constraints and how == "engine" and opening:
        raise invalid(
            f"{constraints[0].field} asks for a form, and the answer is to go on with a message "
            "that has begun: a grammar begins with the answer (rollout.requests.constrained is "
            "engine)"
        )
    if constraints and how == "refuse":
        raise invalid(
            f"{constraints[0].field} asks for answers of a form, and they are sampled freely "
            "(rollout.requests.constrained is refuse): ask for the form in a message"
        )


def _text(field: str, fits: Callable[[str], bool], shape: Part, costly: bool = False) -> Constraint:
    def of_message(answer: Message) -> bool:
        if "tool_calls" in answer:
            return True
        try:
            return fits(answer["content"].rpartition("</think>")[2].strip())
        except (ValueError, RecursionError, EarlError):
            return False

    return Constraint(field, of_message, costly, shape)
