"""The forms in which rows say a chat: prompt, answer and tools, for prompts and demonstrations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from earl_core.environments.adapters.chat_messages import (
    drop_absent,
    read_messages,
    read_tools,
    read_turns,
)
from earl_core.environments.base import Message
from earl_core.system.errors import ConfigError
from earl_core.system.similar import meant

Form = Literal["auto", "openai", "trl", "verl", "sharegpt", "alpaca", "plain"]

_PLACES: dict[str, tuple[str, ...]] = {
    "auto": ("prompt", "messages", "conversations", "instruction"),
    "openai": ("messages", "prompt"),
    "trl": ("prompt", "messages"),
    "verl": ("prompt",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction",),
    "plain": ("prompt",),
}
"""Columns that hold the chat, or its prompt; the first that a row has."""

_CHATS = ("messages", "conversations")
"""Columns whose texts are lists that are written as JSON."""

_LEARNT_PLACES = ("messages", "conversations", "prompt", "instruction")
"""The same of `auto`, for demonstrations."""

ANSWERS: dict[str, tuple[str, ...]] = {
    "auto": ("completion", "reward_model.ground_truth"),
    "openai": (),
    "trl": ("completion",),
    "verl": ("reward_model.ground_truth",),
    "sharegpt": (),
    "alpaca": ("output",),
    "plain": (),
}
"""Paths of the answer where a row has no column `answer`; after them comes the chat's last turn."""

_LISTED = re.compile(r"\s*\[\s*\{")
"""The beginning of a text that may be a chat, written as JSON."""

_WANTED = {
    "openai": "a list of messages with role and content",
    "trl": "a text or a list of messages with role and content",
    "verl": "a list of messages with role and content",
    "sharegpt": "a list of turns with from and value",
    "alpaca": "a text",
    "plain": "a text",
}

ABSENT: Any = object()
"""What a row does not have."""


class ChatRow(NamedTuple):
    """What a row asks. prompt: the messages before its answer. answer: the value that completions
    are compared with; None where none is asked for. tools: its own, None where it names none."""

    prompt: list[Message]
    answer: Any
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True)
class RowForm:
    """How rows are read.

    form: `auto` takes what a row's columns look like. column: of the chat or its prompt; None: the
        form's. answer: column or dotted path of the answer; `answer` is the form's place where a
        row has no such column; None: there is none. learnt: rows are demonstrations.
    """

    form: Form = "auto"
    column: str | None = None
    answer: str | None = "answer"
    learnt: bool = False

    def place(self, columns: Any) -> str:
        """The column of the chat or its prompt. Raises `ConfigError` that goes on after the row's
        place."""
        places = _LEARNT_PLACES if self.learnt and self.form == "auto" else _PLACES[self.form]
        places = places if self.column is None else (self.column,)
        found = next((each for each in places if each in columns), None)
        if found is None:
            raise self._no_place(places, columns)
        return found

    def _no_place(self, places: tuple[str, ...], columns: Any) -> ConfigError:
        """The error of a row with none of these columns."""
        *others, last = map(repr, places)
        named = f"{', '.join(others)} or {last}" if others else last
        reads = "" if self.column or self.form == "auto" else f", which format {self.form!r} reads"
        return _no_column(named + reads, places[0], columns)

    def chat(self, row: Mapping[str, Any]) -> list[Message]:
        """All messages of a row, the answer included. Raises as `place`."""
        column = self.place(row)
        given = row[column]
        if isinstance(given, str) and self.form in ("openai", "verl", "sharegpt"):
            given = _parsed(column, given)
        turns = isinstance(given, list) and bool(given) and _is_turn(given[0])
        told = self._misfit(column, given, turns)
        if told:
            raise ConfigError(f"has a prompt (column {column!r}) that {told}")
        if isinstance(given, str):
            messages = self._texts(row, given)
        else:
            messages = (read_turns if turns else read_messages)(given, self.learnt)
        system = row.get("system")
        if (turns or self.column is None) and isinstance(system, str) and system.strip():
            if messages[0]["role"] != "system":
                messages[:0] = read_messages([{"role": "system", "content": system}])
            elif messages[0]["content"].strip() != system.strip():
                raise ConfigError("has a system message in its chat and in the column 'system'")
        if self.learnt:
            messages += self._demonstrated(row, messages)
        return messages

    def read(self, row: Mapping[str, Any]) -> ChatRow:
        """Part a row into prompt and answer. Raises as `place`."""
        # Most rows are two texts, of which there may be millions.
        text = row.get(self.column or "prompt") if self.form in ("auto", "trl", "plain") else None
        alone = "tools" not in row and "system" not in row
        if alone and type(text) is str and text.isascii() and not _LISTED.match(text):
            answer = None if self.answer is None else row.get(self.answer)
            if self.answer is None or type(answer) in (str, int, float):
                return ChatRow([{"role": "user", "content": text}], answer, None)
        messages = self.chat(row)
        tools = self.tools(row)
        drop_absent(messages, tools or ())
        said = messages.pop() if messages[-1]["role"] == "assistant" else None
        if not messages:
            raise ConfigError("has nothing before its answer")
        place = self.answer_place(row)
        if said and place == "completion" and row["completion"] and self.place(row) == "prompt":
            raise _ends_twice()
        answer = None if self.answer is None else self._answer(row, said)
        return ChatRow(messages, answer, tools)

    def answer_place(self, row: Mapping[str, Any]) -> str:
        """The column or path of a row's answer, "" where its chat ends with it, or where it has
        none."""
        return next((path for path in self._places(row) if look_up(row, path) is not ABSENT), "")

    def tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The tools that a row brings, None where it names none. Raises as `place`."""
        return read_tools(row, declared=self.form != "auto")

    def takes_text(self, column: str) -> bool:
        """Whether a text in this column is a prompt, and no list that is written as JSON."""
        if self.form == "auto":
            return self.column is not None or column not in _CHATS
        return self.form in ("trl", "alpaca", "plain")

    def asks_text(self, row: Mapping[str, Any]) -> bool:
        """Whether a row's prompt is one text, and no chat, in JSON or with a history. Raises as
        `place`."""
        column = self.place(row)
        if not isinstance(row[column], str) or not self.takes_text(column):
            return False
        return not (self._alpaca(row) and row.get("history"))

    def _misfit(self, column: str, given: Any, turns: bool) -> str:
        """Why the value of the chat's column is not what the form has there, "" where it is."""
        if given is None:
            return "is null"
        chat = isinstance(given, list)
        if self.form == "auto":
            text = isinstance(given, str) and self.takes_text(column)
            fits = chat or (text and not _is_written_chat(given))
            wanted = "neither a text nor a list of messages with role and content"
            if isinstance(given, str):
                wanted = "a text, where a list of messages is expected; declare its format"
        else:
            wanted = f"not {_WANTED[self.form]}, as the format {self.form} has it"
            fits = {
                "openai": chat and not turns,
                "verl": chat and not turns,
                "trl": isinstance(given, str) or (chat and not turns),
                "sharegpt": chat and (turns or not given),
            }.get(self.form, isinstance(given, str))
        if not fits:
            return f"is {wanted}"
        return "is an empty list" if given == [] else ""

    def _alpaca(self, row: Mapping[str, Any]) -> bool:
        return self.form == "alpaca" or (
            self.form == "auto" and self.column is None and self.place(row) == "instruction"
        )

    def _texts(self, row: Mapping[str, Any], text: str) -> list[Message]:
        """The messages before the answer, of a form that writes texts."""
        messages: list[Message] = []
        if self._alpaca(row):
            for pair in row.get("history") or ():
                if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_text, pair))):
                    raise ConfigError("has in history no pair of a question and an answer")
                roles = zip(("user", "assistant"), pair, strict=True)
                messages += read_messages([{"role": role, "content": say} for role, say in roles])
            more = row.get("input")
            if more is not None and not _is_text(more):
                raise ConfigError("has in the column 'input' no text")
            text = "\n\n".join(each for each in (text, more) if each and each.strip()) or text
        return [*messages, *read_messages([{"role": "user", "content": text}])]

    def _demonstrated(self, row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
        """The answer that another column has, none where the chat ends with one. Raises as
        `place` where nobody answers."""
        paths = [path for path in self._paths(row) if "." not in path]
        if self.form in ("auto", "plain"):
            paths.append("answer")
        if messages[-1]["role"] != "assistant":
            for path in paths:
                said = row.get(path)
                if isinstance(said, list) and said:
                    answers = read_messages(said, self.learnt)
                    if any(each["role"] not in ("assistant", "tool") for each in answers):
                        raise ConfigError(f"has in the column {path!r} more than answers")
                    return answers
                # A table of numbers has NaN where it has none.
                if isinstance(said, str | int | float) and said == said:
                    answer = {"role": "assistant", "content": str(said)}
                    return read_messages([answer], self.learnt)
            if empty := [path for path in paths if path in row]:
                raise ConfigError(f"has an answer (column {empty[0]!r}) that is no text")
        elif "completion" in paths and self.place(row) == "prompt" and row.get("completion"):
            raise _ends_twice()
        if not any(message["role"] == "assistant" for message in messages):
            raise ConfigError(
                "has no turn of the assistant, so there is nothing to imitate",
                remedy="leave it out",
            )
        return []

    def _paths(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Paths of the answer, where a row has no column `answer`."""
        return ANSWERS["alpaca" if self._alpaca(row) else self.form]

    def _places(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        if self.answer is None:
            return ()
        return (self.answer, *(self._paths(row) if self.answer == "answer" else ()))

    def _answer(self, row: Mapping[str, Any], said: Message | None) -> Any:
        assert self.answer is not None
        paths = self._places(row)
        if path := self.answer_place(row):
            return _value(path, look_up(row, path))
        if self.answer == "answer" and said is not None:
            return dict(said) if "tool_calls" in said else said["content"]
        if self.form in ("openai", "sharegpt") and self.answer == "answer":
            raise ConfigError("has no answer: its chat does not end with the assistant's message")
        for struct in (path.partition(".")[0] for path in paths):
            if struct in row and row[struct] is None:
                raise ConfigError(f"has an answer (column {struct!r}) that is null")
        path = self.answer if self.form == "auto" else paths[-1]
        raise _no_column(repr(path), path, row)


def look_up(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column, or of a field of a struct by a dotted path; `ABSENT` for none."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _value(path: str, value: Any) -> Any:
    """An answer; a message, or a list of one, is its content."""
    if value is None:
        raise ConfigError(f"has an answer (column {path!r}) that is null")
    several = value if isinstance(value, list) else [value]
    if several and all(isinstance(each, Mapping) and "role" in each for each in several):
        if len(several) > 1:
            raise ConfigError(f"has an answer (column {path!r}) of {len(several)} messages")
        (message,) = read_messages(several)
        if message["role"] != "assistant":
            raise ConfigError(f"has an answer (column {path!r}) that the {message['role']} says")
        return dict(message) if "tool_calls" in message else message["content"]
    return value


def _no_column(named: str, column: str, columns: Any) -> ConfigError:
    near = meant(column, columns).strip()
    told = f"has no column {named}; it has {', '.join(columns)}"
    return ConfigError(f"{told} ({near})" if near else told)


def _ends_twice() -> ConfigError:
    return ConfigError("has an answer at the end of its prompt and in 'completion'")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and "from" in turn and "role" not in turn


def _is_written_chat(text: str) -> bool:
    """Whether a text is a list of messages or turns that is written as JSON."""
    if not _LISTED.match(text):
        return False
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return all(isinstance(each, Mapping) and ("role" in each or _is_turn(each)) for each in given)


def _parsed(column: str, text: str) -> Any:
    """A list that a table holds as JSON; the text itself where it is none."""
    if not text.lstrip().startswith("["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"has in the column {column!r} a text that is no JSON ({error})"
        ) from error
