"""Check that the rows of a data set can be asked and scored: all are looked at before work.

Columns of Arrow are looked at as columns, a few hundred million values a minute; lines of JSON are
parsed, some ten million a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earl_core.environments.rewards.results import ROLES
from earl_core.system.import_path import import_package
from earl_core.system.similar import meant

AnswerRule = Callable[[Any], str]
"""Rule that returns the fault of an answer, "" for none."""

_DEEPEST = 100


@dataclass(frozen=True)
class RowRules:
    """The columns that a row needs. prompt: the column of the prompt. answer: that of the answer,
    with its rule. scoring: columns that reward functions get."""

    prompt: str
    answer: str | None
    rule: AnswerRule | None
    scoring: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """All that a row must have."""
        named = (self.prompt, self.answer, *self.scoring)
        return tuple(column for column in named if column is not None)

    def fault(self, row: Mapping[str, Any]) -> str:
        """Return the fault of a row, "" for none."""
        for column in self.columns:
            if column not in row:
                near = meant(column, row).strip()
                return f"has no column {column!r}; it has {', '.join(row)}" + (
                    f" ({near})" if near else ""
                )
        if told := prompt_fault(row[self.prompt]):
            return f"has a prompt (column {self.prompt!r}) that {told}"
        judged = self.rule is not None and self.answer is not None
        if judged and (told := self.rule(row[self.answer])):  # type: ignore[misc, index]
            return f"has an answer (column {self.answer!r}) that {told}"
        for column in self.scoring:
            if told := _unscored(row[column], 0):
                return f"has in the column {column!r} {told}, which no reward function can be given"
        return ""

    def suspects(self, table: Any) -> Sequence[int] | None:
        """Rows of an Arrow table among which are all that have a fault; None: look at all."""
        pc = import_package("pyarrow.compute", "pyarrow")
        if any(column not in table.column_names for column in self.columns):
            return [0]
        masks = [_bad_prompts(table[self.prompt])]
        if self.rule is not None and self.answer is not None:
            masks.append(_bad_answers(table[self.answer], self.rule is not text_or_number))
        masks += [_not_finite(table[column]) for column in self.scoring]
        if any(mask is None for mask in masks):
            return None
        found: set[int] = set()
        for mask in masks:
            found |= set(pc.indices_nonzero(pc.fill_null(mask, True)).to_pylist())
        return sorted(found)


def prompt_fault(prompt: Any) -> str:
    """Return the fault of a text or a list of messages, "" for none."""
    if isinstance(prompt, str):
        if prompt.isascii():
            return "" if prompt and not prompt.isspace() else "is empty"
        return _text_fault(prompt) or ("is empty" if not prompt.strip() else "")
    if prompt is None:
        return "is null"
    if not isinstance(prompt, list):
        return "is neither a text nor a list of messages with role and content"
    if not prompt:
        return "is an empty list"
    said = False
    for message in prompt:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            return f"has a message whose role is none of {', '.join(ROLES)}"
        content = message.get("content")
        if not isinstance(content, str):
            return "has a message whose content is no text"
        if told := _text_fault(content):
            return told
        said = said or bool(content.strip())
    return "" if said else "is empty: no message says anything"


def text_or_number(answer: Any) -> str:
    """The rule of answers that are compared as a whole."""
    if isinstance(answer, str):
        return _text_fault(answer) or ("is empty" if not answer.strip() else "")
    if answer is None:
        return "is null"
    if isinstance(answer, float) and not math.isfinite(answer):
        return f"is {answer}"
    if isinstance(answer, list | dict):
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


def _bad_prompts(column: Any) -> Any:
    """A mask of rows that may be no prompt; None where the type says nothing."""
    pa = import_package("pyarrow", "pyarrow")
    pc = import_package("pyarrow.compute", "pyarrow")
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _blank(column)
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


def _without(column: Any, pattern: str) -> Any:
    pc = import_package("pyarrow.compute", "pyarrow")
    return pc.fill_null(pc.invert(pc.match_substring_regex(column, pattern)), True)


def _bad_answers(column: Any, numbers: bool) -> Any:
    pa = import_package("pyarrow", "pyarrow")
    pc = import_package("pyarrow.compute", "pyarrow")
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.fill_null(pc.invert(pc.is_finite(column)), True)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.is_null(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # Numbers without digits of ASCII are looked at in Python.
        return pc.or_(_blank(column), _without(column, "[0-9]")) if numbers else _blank(column)
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
