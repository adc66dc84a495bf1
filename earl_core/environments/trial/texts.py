"""Texts that a model might answer before it has learnt anything."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

from earl_core.environments.base import Message

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_NUMBER = re.compile(r"\b[0-9]{1,9}\b")
_WORD = re.compile(r"\w+")
_LONG = 2000
_PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n" + "é→中"


class RandomTexts:
    """The answers of one episode.

    number: of the episode. Every third gives legal answers where the environment knows them, every
    third takes moves, numbers and words out of what it was shown, and every third writes random
    characters, among them nothing at all and a long text. characters: the environment's own.
    """

    def __init__(self, number: int, characters: str) -> None:
        self._random = random.Random(f"trial/{number}")
        self._kind = number % 3
        self._characters = characters or _PRINTABLE

    def answer(self, messages: Sequence[Message], legal: Sequence[str]) -> str:
        """An answer to the last messages. legal: what the environment says that it takes."""
        if self._kind == 0 and legal:
            return self._random.choice(legal)
        shown = "\n".join(message["content"] for message in messages)
        if self._kind < 2 and (found := self._found(shown)):
            return self._random.choice(found)
        length = self._random.choice((0, 1, 1, 2, 4, 20, _LONG))
        return "".join(self._random.choices(self._characters, k=length))

    def _found(self, shown: str) -> list[str]:
        """Moves in brackets; without these a number in the range of those shown, or the words."""
        numbers = [int(digits) for digits in _NUMBER.findall(shown)]
        if moves := _BRACKETED.findall(shown):
            return moves
        if numbers and self._random.random() < 0.5:
            return [str(self._random.randint(min(numbers), max(numbers)))]
        return _WORD.findall(shown)
