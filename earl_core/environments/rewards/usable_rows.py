"""Check that the rows of a data set can be asked and scored: all are looked at before work.

Columns of Arrow are looked at as columns, a few hundred million values a minute; lines of JSON are
parsed, some ten million a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earl_core.environments.adapters.row_forms import ANSWERS, RowForm
from earl_core.environments.base import Message
from earl_core.environments.rewards.results import ROLES
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_package

AnswerRule = Callable[[Any], str]
"""Rule that returns the fault of an answer, "" for none."""

_DEEPEST = 100
_READ_ALONE = ("sharegpt", "alpaca", "plain")
"""Formats whose rows are looked at one by one."""


@dataclass(frozen=True)
class RowRules:
    """What a row needs. form: how it is read. rule: of its answer. scoring: columns that reward
    functions get."""

    form: RowForm
    rule: AnswerRule | None
    scoring: tuple[str, ...]

    def fault(self, row: Mapping[str, Any]) -> str:
        """Return the fault of a row, "" for none."""
        try:
            chat = self.form.read(row)
        except ConfigError as error:
            return f"{error.problem} ({error.remedy})" if error.remedy else error.problem
        if told := _prompt_fault(chat.prompt):
            return f"has a prompt (column {self.form.place(row)!r}) that {told}"
        judged = self.rule is not None and self.form.answer is not None
        if judged and (told := self.rule(chat.answer)):  # type: ignore[misc]
            place = self.form.answer_place(row)
            named = f"column {place!r}" if place else "its last message"
            return f"has an answer ({named}) that {told}"
        for column in self.scoring:
            if column not in row:
                return f"has no column {column!r}; it has {', '.join(row)}"
            if told := _unscored(row[column], 0):
                return f"has in the column {column!r} {told}, which no reward function can be given"
        return ""

    def suspects(self, table: Any) -> Sequence[int] | None:
        """Rows of an Arrow table among which are all that have a fault; None: look at all."""
        pc = import_package("pyarrow.compute", "pyarrow")
        names = table.column_names
        try:
            prompt = self.form.place(names)
        except ConfigError:
            return [0]
        if any(column not in names for column in self.scoring):
            return [0]
        if self.form.form in _READ_ALONE or prompt == "instruction":
            return None
        if "tools" in names or "system" in names:
            return None
        masks = [_bad_prompts(table[prompt], self.form.takes_text(prompt))]
        if self.form.answer is not None:
            masks.append(self._bad_answers(table))
        masks += [_not_finite(table[column]) for column in self.scoring]
        if any(mask is None for mask in masks):
            return None
        found: set[int] = set()
        for mask in masks:
            found |= set(pc.indices_nonzero(pc.fill_null(mask, True)).to_pylist())
        return sorted(found)

    def _bad_answers(self, table: Any) -> Any:
        """A mask of rows that may have no answer; None where the columns do not tell."""
        pc = import_package("pyarrow.compute", "pyarrow")
        own = ANSWERS[self.form.form] if self.form.answer == "answer" else ()
        for path in map(str, (self.form.answer, *own)):
            if path in table.column_names:
                return _bad_answers(table[path], self.rule)
            name, _, field = path.partition(".")
            if name in table.column_names:
                kind = table[name].type
                known = hasattr(kind, "get_field_index") and kind.get_field_index(field) >= 0
                if not known or "." in field:
                    return None
                return _bad_answers(pc.struct_field(table[name], field), self.rule)
        return None


def _prompt_fault(messages: Sequence[Message]) -> str:
    """Return the fault of the messages of a prompt, "" for none."""
    said = False
    for message in messages:
        if message["role"] not in ROLES:
            return f"has a message whose role is none of {', '.join(ROLES)}"
        said = said or bool(message["content"].strip())
    return "" if said else "is empty: no message says anything"


def text_or_number(answer: Any) -> str:
    """The rule of answers that are compared as a whole."""
    if isinstance(answer, str):
        return _text_fault(answer) or ("is empty" if not answer.strip() else "")
    if answer is None:
        return "is null"
    if isinstance(answer, float) and not math.isfinite(answer):
        return f"is {answer}"
    if isinstance(answer, list | dict | tuple | set | bytes):
        return f"is a {type(answer).__name__}, neither a text nor a number"
    return ""


def _text_fault(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half a character at {error.start} and cannot be encoded as UTF-8"
    return ""


def _unscored(value: Any, depth: int) -> str:
    """NaN, infinity or half a character in a value, "" for none."""
    if depth > _DEEPEST:
        return "a value that is nested too deeply"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"the number {value}"
    if isinstance(value, str):
        return "half a character" if _text_fault(value) else ""
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        inner = value
    return next((told for each in inner if (told := _unscored(each, depth + 1))), "")


def _bad_prompts(column: Any, texts: bool) -> Any:
    """A mask of rows that may be no prompt; None where the type says nothing."""
    pa = import_package("pyarrow", "pyarrow")
    pc = import_package("pyarrow.compute", "pyarrow")
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # A text may be a chat that is written as JSON.
        return pc.or_(_blank(column), _with(column, r"^\s*\[\s*\{")) if texts else None
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    inner = kind.value_type
    if not pa.types.is_struct(inner) or {"role", "content"} - {each.name for each in inner}:
        return None
    masks = []
    for chunk in column.chunks:
        messages, parents = chunk.flatten(), pc.list_parent_indices(chunk)
        role, content = messages.field("role"), messages.field("content")
        if not pa.types.is_string(role.type) or not pa.types.is_string(content.type):
            return None
        if pc.any(pc.equal(role, "assistant")).as_py():
            # The last message may be the answer.
            return None
        known = pc.is_in(role, value_set=pa.array(ROLES, role.type))
        blank = _blank(content)
        wrong = pc.or_(pc.or_(pc.invert(known), pc.is_null(content)), pc.is_null(messages))
        bad = set(parents.filter(wrong).to_pylist())
        saying = pc.is_in(
            pa.array(range(len(chunk)), parents.type),
            value_set=pc.unique(parents.filter(pc.invert(blank))),
        )
        broken = pc.is_in(
            pa.array(range(len(chunk)), parents.type), value_set=pa.array(sorted(bad), parents.type)
        )
        masks.append(pc.or_(pc.invert(saying), broken))
    return pa.chunked_array(masks, pa.bool_())


def _blank(column: Any) -> Any:
    """A mask of texts that are null, without a word or (all then) not UTF-8."""
    pc = import_package("pyarrow.compute", "pyarrow")
    try:
        column.validate(full=True)
    except Exception:
        return pc.or_kleene(pc.is_null(column), True)
    return _without(column, r"[^\s\pZ\x0b\x1c-\x1f\x85]")


def _with(column: Any, pattern: str) -> Any:
    pc = import_package("pyarrow.compute", "pyarrow")
    return pc.fill_null(pc.match_substring_regex(column, pattern), True)


def _without(column: Any, pattern: str) -> Any:
    pc = import_package("pyarrow.compute", "pyarrow")
    return pc.fill_null(pc.invert(pc.match_substring_regex(column, pattern)), True)


def _bad_answers(column: Any, rule: AnswerRule | None) -> Any:
    pa = import_package("pyarrow", "pyarrow")
    pc = import_package("pyarrow.compute", "pyarrow")
    kind = column.type
    if pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
        return None
    if pa.types.is_boolean(kind) and rule not in (None, text_or_number):
        return None
    if rule is None or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.is_null(column)
    if pa.types.is_floating(kind):
        return pc.fill_null(pc.invert(pc.is_finite(column)), True)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if rule is text_or_number:
            return _blank(column)
        # Numbers without digits of ASCII are looked at in Python.
        return pc.or_(_blank(column), _without(column, "[0-9]"))
    return None


def _not_finite(column: Any) -> Any:
    """A mask of values with a number in them that is not finite."""
    pa = import_package("pyarrow", "pyarrow")
    pc = import_package("pyarrow.compute", "pyarrow")
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.fill_null(pc.invert(pc.is_finite(column)), False)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            column.validate(full=True)
        except Exception:
            return None
    if pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
        return None
    return pc.and_kleene(pc.is_null(column), False)
