"""Answers to prompts in a bounded number of bytes, and what followed in them after the same tokens.

As in LZ77: the last place of each pair of tokens is in a hash table, and each place names the one
before it. A pair belongs to its prompt, so that an answer is continued by those to the same prompt
only, itself included.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

_PLACE_BITS = 24
_SLOT_BYTES = 8
# An answer's object, its two arrays and its entry in the table of answers.
_ANSWER_BYTES = 512
# A token, and the place before it; arrays reserve an eighth more than they hold.
_TOKEN_BYTES = 14
_MOST_SLOTS = 1 << 22

LONGEST_MATCH = 16
"""Tokens before a place that are compared."""
NEWEST = 8
"""Places that are looked at, the newest first."""
_STEPS = 32


class Found(NamedTuple):
    """A likely continuation. match: how many tokens before it are equal, `LONGEST_MATCH` at most;
    0: there is none."""

    tokens: list[int]
    match: int


NOTHING = Found([], 0)


class PastAnswer:
    """An answer that is remembered while it grows. It begins with two marks of its turn, so that
    the first tokens of answers of one turn follow the same pair."""

    __slots__ = ("before", "number", "open", "prompt", "tokens")

    def __init__(self, number: int, prompt: int, turn: int) -> None:
        self.number, self.prompt, self.open = number, prompt, True
        self.tokens = array("i", (-1 - turn, -1 - turn))
        self.before = array("q", (-1, -1))

    @property
    def nbytes(self) -> int:
        """At least the bytes that it takes."""
        return _ANSWER_BYTES + len(self.tokens) * _TOKEN_BYTES


class PastAnswers:
    """The newest answers that fit. memory: in bytes, all told."""

    def __init__(self, memory: int) -> None:
        slots = min(_MOST_SLOTS, memory // (4 * _SLOT_BYTES))
        self._mask = (1 << max(slots.bit_length() - 1, 0)) - 1
        self._last = array("q", bytes(_SLOT_BYTES * (self._mask + 1)))
        for slot in range(len(self._last)):
            self._last[slot] = -1
        self._memory = memory
        self._answers: dict[int, PastAnswer] = {}
        self._next = 0
        self._bytes = sys.getsizeof(self._last)

    @property
    def nbytes(self) -> int:
        """At least the bytes that it takes; at most `memory`."""
        return self._bytes

    def __len__(self) -> int:
        """How many answers it holds."""
        return len(self._answers)

    def begin(self, prompt: int, turn: int) -> PastAnswer:
        """Another answer to this prompt; `end` must follow. prompt: a hash of it."""
        answer = PastAnswer(self._next, prompt, turn)
        self._next += 1
        self._make_room(answer.nbytes)
        if answer.nbytes + self._bytes > self._memory:
            answer.open = False
            return answer
        self._answers[answer.number] = answer
        self._bytes += answer.nbytes
        return answer

    def add(self, answer: PastAnswer, tokens: Iterable[int]) -> None:
        """The answer goes on with these tokens. Where nothing that has ended can make room it is no
        longer `open`, and forgets them."""
        for token in tokens:
            if not answer.open:
                return
            at = len(answer.tokens)
            if self._bytes + _TOKEN_BYTES > self._memory:
                self._make_room(_TOKEN_BYTES)
            if self._bytes + _TOKEN_BYTES > self._memory or at >> _PLACE_BITS:
                self.end(answer)
                return
            slot = self._slot(answer.prompt, answer.tokens[-2], answer.tokens[-1])
            answer.before.append(self._last[slot])
            answer.tokens.append(token)
            self._last[slot] = answer.number << _PLACE_BITS | at
            self._bytes += _TOKEN_BYTES

    def end(self, answer: PastAnswer) -> None:
        """The answer is whole, and makes room for others when they need it."""
        answer.open = False

    def continued(self, answer: PastAnswer, most: int) -> Found:
        """What followed the answer's last tokens before: at most so many tokens.

        Of the newest places after the same pair those count that are the most alike; the first
        token is the one that most of them have, and the others are of the newest that has it.
        """
        tokens = answer.tokens
        first, second = tokens[-2], tokens[-1]
        place, longest = self._last[self._slot(answer.prompt, first, second)], 2
        best: list[tuple[PastAnswer, int]] = []
        seen = 0
        for _ in range(_STEPS):
            other = self._answers.get(place >> _PLACE_BITS) if place >= 0 else None
            if other is None or seen == NEWEST:
                break
            at = place & (1 << _PLACE_BITS) - 1
            place = other.before[at]
            theirs = other.tokens
            if theirs[at - 1] != second or theirs[at - 2] != first or other.prompt != answer.prompt:
                continue
            seen += 1
            match = _match(tokens, theirs, at)
            if match > longest:
                longest, best = match, []
            if match == longest:
                best.append((other, at))
        if not best:
            return NOTHING
        chosen = Counter(other.tokens[at] for other, at in best).most_common(1)[0][0]
        source, at = next((o, at) for o, at in best if o.tokens[at] == chosen)
        return Found(_copied(source, at, most, source is answer), longest)

    def _slot(self, prompt: int, first: int, second: int) -> int:
        mixed = (prompt ^ first * 0x9E3779B97F4A7C15 ^ second * 0xC2B2AE3D27D4EB4F) & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB & (1 << 64) - 1
        return (mixed ^ mixed >> 29) & self._mask

    def _make_room(self, wanted: int) -> None:
        """Forget the oldest answers that have ended, until so many bytes are free."""
        while self._bytes + wanted > self._memory:
            oldest = next((each for each in self._answers.values() if not each.open), None)
            if oldest is None:
                return
            self._bytes -= oldest.nbytes
            del self._answers[oldest.number]


def _match(tokens: array[int], theirs: array[int], at: int) -> int:
    """Tokens before the end of one that are those before a place of the other; the marks count."""
    most, match = min(LONGEST_MATCH, len(tokens), at), 2
    while match < most and tokens[-1 - match] == theirs[at - 1 - match]:
        match += 1
    return match


def _copied(source: PastAnswer, at: int, most: int, itself: bool) -> list[int]:
    """The tokens from a place on. Where an answer continues itself it repeats what it copies."""
    copied = source.tokens[at : at + most].tolist()
    period = len(source.tokens) - at
    while itself and len(copied) < most:
        copied.append(copied[len(copied) - period])
    return copied
