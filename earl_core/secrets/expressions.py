"""What rules look for in a text: words and regular expressions, and where they are found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import regex

from earl_core.secrets.lookalikes import PlainText, plain, unescaped

Span = tuple[int, int]

SHORTEST_SPLIT = 4
"""Characters of words that are looked for over breaks of lines and borders of texts; shorter ones
are all over."""

_SECONDS, _SECONDS_AGAIN, _SECONDS_OF_CHARACTER = 1.0, 0.05, 1e-6
"""For which an expression may look at a text, the first time that it takes too long and later on,
and so much more for each character."""

_LONG = 6
_BETWEEN = {True: r"(?:\s*|[\W_]{0,12})", False: r"(?:\s+|[\W_]{1,12})"}
"""What may stand between the parts of a word (`ada.lovelace`, `Ada+Lovelace`, `Ada, Lovelace`);
nothing where it has `_LONG` characters, for `U.S.` is not `us`."""
_BREAK = re.compile(r"\n|\\n")
_PARTS = re.compile(r"(?<=[^\W\d_])['._-]+(?=[^\W\d_])|\s+")


class Reading:
    """A text, and how it may be read."""

    def __init__(self, text: str) -> None:
        self.text, self.plain = text, plain(text)
        self._unescaped: PlainText | None = None
        self._looked = False

    @property
    def unescaped(self) -> PlainText | None:
        """With escapes as their characters; None where there are none."""
        if not self._looked:
            self._unescaped, self._looked = unescaped(self.text), True
        return self._unescaped


class Word:
    """A text that is hidden wherever it stands."""

    def __init__(self, word: str) -> None:
        parts = [part for part in _PARTS.split(plain(word).text.strip()) if part]
        self._first = parts[0]
        between = _BETWEEN[sum(map(len, parts)) >= _LONG]
        self._found = re.compile(between.join(map(re.escape, parts)))

    def within(self, text: str) -> Iterable[Span]:
        """Where it stands in a text that is compared."""
        # Seldom, and looking for a fixed text is many times as fast.
        if self._first not in text:
            return ()
        return (match.span() for match in self._found.finditer(text))

    def spans(self, reading: Reading, joined: PlainText | None) -> list[Span]:
        """Where it stands in a text. joined: the text `unbroken`."""
        found = {reading.plain.span(*span) for span in self.within(reading.plain.text)}
        for start, stop in self.within(joined.text) if joined else ():
            span = joined.span(start, stop)  # type: ignore[union-attr]
            if stop - start >= SHORTEST_SPLIT or not _BREAK.search(reading.text, *span):
                found.add(span)
        return joined_spans(found)


class Expression:
    """A regular expression, looked for in a text as it is and as words are compared. slow: texts
    over which it took too long, and of which it counts as finding all. Raises `regex.error`."""

    def __init__(self, pattern: str) -> None:
        self._exact, self._folded = regex.compile(pattern), regex.compile(pattern, regex.IGNORECASE)
        self.slow = 0

    def search(self, text: str) -> bool:
        """Whether it finds anything."""
        return bool(self.spans(Reading(text), empty=True))

    def spans(self, reading: Reading, empty: bool = False) -> list[Span]:
        """What it finds. Places between characters, as of a lookahead, hold nothing to hide, and
        count with `empty` alone."""
        text = reading.text
        try:
            found = set(self._spans(self._exact, text, empty))
            for compared in filter(None, (reading.plain, reading.unescaped)):
                for start, stop in self._spans(self._folded, compared.text, empty):
                    found.add(compared.span(start, stop) if start < stop else (0, 0))
        except TimeoutError:
            self.slow += 1
            return [(0, len(text))]
        return joined_spans(found)

    def _spans(self, expression: regex.Pattern[str], text: str, empty: bool) -> Iterable[Span]:
        seconds = (_SECONDS_AGAIN if self.slow else _SECONDS) + _SECONDS_OF_CHARACTER * len(text)
        # Other threads of the run go on meanwhile.
        for match in expression.finditer(text, timeout=seconds, concurrent=True):
            if empty or match[0]:
                yield match.span()


def joined_spans(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap made one, ascending."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def hidden(text: str, spans: Sequence[tuple[int, int, str]]) -> str:
    """The text with others in the place of spans; where they overlap, that of the first."""
    parts: list[str] = []
    done = 0
    given = sorted(spans)
    instead = {start: word for start, _, word in reversed(given)}
    for start, stop in joined_spans([(a, b) for a, b, _ in given]):
        # Neighbours are one hole, but those that are told apart.
        one = parts and start == done and parts[-1] == instead[start]
        parts += [] if one else [text[done:start], instead[start]]
        done = stop
    return "".join([*parts, text[done:]])
