"""Characters that stand for others while a chat template renders texts from outside.

One character stands for one, so that templates see texts of the same length; letters, digits and
white space stay as they are, but for the first letter of a word that templates may put between
brackets (`<{{ name }}>`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from earl_core.environments.base import Message, ToolCall
from earl_core.system.errors import ConfigError

_POOL = range(0x20000, 0x2A6D7)
"""Rare ideographs: they print as they are, have no upper case, and JSON does not escape them."""
_IN_POOL = re.compile(f"[{chr(_POOL[0])}-{chr(_POOL[-1])}]")
_WORD = re.compile(r"\w+")
_KEPT = "\"\\'"
"""Renderings of JSON escape these."""
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null", "function")
_SCHEMA = (
    *("type", "function", "name", "description", "parameters", "properties", "required", "items"),
    *("enum", "const", "default", "anyOf", "oneOf", "allOf", "not", "format", "title", "examples"),
    *("additionalProperties", "patternProperties", "prefixItems", "nullable", "return", "returns"),
    *("definitions", "strict", "minimum", "maximum", "minItems", "maxItems", "response", "pattern"),
)
_STRUCTURE = frozenset((*_SCHEMA, "$ref", "$defs", "$schema"))
"""Keys of tools and of parts of messages that templates ask for."""


def trie_pattern(texts: Iterable[str]) -> str:
    """A regular expression for the longest of these texts, whose time depends on the length of what
    is found and not on how many they are."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _alternatives(root)


def _alternatives(node: Mapping[str, Any]) -> str:
    longer = [_branch(character, rest) for character, rest in node.items() if character]
    if not longer:
        return ""
    joined = longer[0] if len(longer) == 1 else f"(?:{'|'.join(longer)})"
    return f"(?:{joined})?" if "" in node else joined


def _branch(character: str, node: Mapping[str, Any]) -> str:
    written = re.escape(character)
    while len(node) == 1 and "" not in node:  # deep as a token is long otherwise
        ((character, node),) = node.items()
        written += re.escape(character)
    return written + _alternatives(node)


class Sampled(str):
    """A text that this run's policy has sampled: it needs no disguise, its tokens are its own."""

    __slots__ = ()


class Disguise:
    """A disguise of texts that must not come about. Use `fitting` for each rendering."""

    def __init__(self, forbidden: Iterable[str]) -> None:
        forbidden = list(forbidden)
        runs = {run for text in forbidden for run in _WORD.findall(text)}
        whole = {text for text in forbidden if _WORD.fullmatch(text)}
        self._words = runs - whole
        """Words that a template may complete; those that are a token by themselves stand
        anywhere."""
        self._whole = re.compile(trie_pattern(whole)) if whole else None
        marks = {
            character
            for text in forbidden
            for character in text
            if not (character.isalnum() or character.isspace() or character in "_" + _KEPT)
        }
        self._marks = sorted(marks)
        self._letters = sorted({run[0] for run in runs})
        self._take(_POOL)

    def fitting(self, outside: object) -> Self:
        """One whose characters do not occur in these texts. Raises `ConfigError` where these hold
        nearly all that there are."""
        taken = set(_IN_POOL.findall(str(outside)))
        if taken:
            other = object.__new__(type(self))
            other.__dict__ |= self.__dict__
            other._take(number for number in _POOL if chr(number) not in taken)
            return other
        return self

    def _take(self, free: Iterable[int]) -> None:
        shown = sorted({*self._marks, *self._letters})
        standing = dict(zip(shown, map(chr, free), strict=False))
        if len(standing) < len(shown):
            raise ConfigError(
                "the messages hold nearly all rare ideographs (U+20000 to U+2A6D6), so that none "
                "is left to tell their texts from the template's: leave some out"
            )
        self._all = {ord(character): other for character, other in standing.items()}
        self._of_marks = {ord(each): standing[each] for each in self._marks}
        self._back = {ord(other): character for character, other in standing.items()}

    def removed(self, text: str) -> str:
        """The text with its own characters."""
        return text.translate(self._back) if _IN_POOL.search(text) else text

    def text(self, text: str) -> str:
        """A text from outside; what was sampled stays."""
        if isinstance(text, Sampled):
            return text
        if self._whole is not None:
            text = self._whole.sub(self._first_letter, text)
        if not self._words.isdisjoint(_WORD.findall(text)):
            text = _WORD.sub(self._word, text)
        return text.translate(self._of_marks)

    def _word(self, found: re.Match[str]) -> str:
        return self._first_letter(found) if found[0] in self._words else found[0]

    def _first_letter(self, found: re.Match[str]) -> str:
        return found[0][0].translate(self._all) + found[0][1:]

    def value(self, value: Any, structure: frozenset[str] = frozenset()) -> Any:
        """Disguise whatever JSON can hold, the keys too. structure: keys that stay, and texts that
        are just one of them, since lists of what is required repeat keys."""
        if isinstance(value, str):
            return value if value in structure else self.text(value)
        if isinstance(value, list | tuple):
            return [self.value(each, structure) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            self._key(key, structure): each
            if key == "type" and structure and each in _TYPES
            else self.value(each, structure)
            for key, each in value.items()
        }

    def _key(self, key: Any, structure: frozenset[str]) -> Any:
        return self.text(key) if isinstance(key, str) and key not in structure else key

    def schemas(self, schemas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Disguise the schemas that describe tools."""
        return [self.value(schema, _STRUCTURE) for schema in schemas]

    def message(self, message: Message) -> Message:
        """All texts of a message but its role, of which only the punctuation is replaced."""
        hidden: dict[str, Any] = {
            key: self.value(value, _STRUCTURE if isinstance(value, list) else frozenset())
            for key, value in message.items()
        }
        hidden["role"] = message["role"].translate(self._of_marks)
        if message.get("tool_calls"):
            hidden["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return hidden  # type: ignore[return-value]

    def _call(self, call: ToolCall) -> Any:
        return {
            key: value
            if key == "type"
            else {name: self.value(each) for name, each in value.items()}
            if isinstance(value, dict)
            else self.value(value)
            for key, value in call.items()
        }
