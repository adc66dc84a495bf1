"""What is left in exported episodes that somebody should look at before they are shared.

Rules find what they name; this finds what nobody may have thought of, at three levels. Tokens:
strings that stand in one episode only and look like a name or a number of something. Turns: long
stretches that an answer has word for word from what stood before it. Episodes: identifiers by which
episodes can be linked to each other, and times by which they can be linked to people. It proves
nothing: an empty list is no claim of privacy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

_SHOWN = 50
_VERBATIM = 60
"""Characters of a stretch that is told."""

_STRING = re.compile(r"[^\s\"'`(){}\[\]<>,;]{4,}")
_TELLING = re.compile(r"\d.*[A-Za-z]|[A-Za-z].*\d|[@_/\\.:-].*\w|[a-z][A-Z]|\d{4,}")
_IDENTIFIERS = {
    "uuid": r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",
    "address": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "url": r"\bhttps?://[^\s\"'<>)]+",
    "network address": r"\b\d{1,3}(?:\.\d{1,3}){3}\b",
    "path": r"(?:/(?:home|Users|root|mnt|srv|data)/|[A-Z]:\\)[^\s\"'<>)]+",
    "hexadecimal": r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b",
    "number": r"\b\d(?:[ -]?\d){7,}\b",
}
_TIMES = {
    "date": r"\b(?:19|20)\d\d-[01]\d-[0-3]\d(?:[T ][0-2]\d:[0-5]\d(?::[0-5]\d)?)?",
    "written date": r"\b\d{1,2}[./ ](?:\d{1,2}|[A-Z][a-z]{2,8})[./ ](?:19|20)\d\d\b",
    "clock": r"\b[0-2]?\d:[0-5]\d(?::[0-5]\d)?\b",
    "epoch": r"\b1[4-9]\d{8}(?:\.\d+|\d{3})?\b",
}
_FOUND = {
    kind: {name: re.compile(pattern) for name, pattern in table.items()}
    for kind, table in (("identifiers", _IDENTIFIERS), ("times", _TIMES))
}

_NUMBERS = ("iteration", "episode_id", "group_id", "prompt_id", "reward")
"""Fields whose numbers are the run's own."""

Row = dict[str, Any]


class Remnants:
    """Looks at one exported episode after the other; see `report`."""

    def __init__(self) -> None:
        self._episodes = 0
        self._strings: dict[str, set[int]] = defaultdict(set)
        self._seen: dict[str, dict[tuple[str, str], set[int]]] = {
            kind: defaultdict(set) for kind in _FOUND
        }
        self._verbatim: list[dict[str, Any]] = []
        self._copied = 0

    def look_at(self, row: Row, hashed: Sequence[str] = ()) -> None:
        """Take the next episode. hashed: fields in whose place a keyed hash stands."""
        number, self._episodes = self._episodes, self._episodes + 1
        fields = [name for name in row if name not in (*_NUMBERS, *hashed)]
        for text in _texts_of([row[name] for name in fields]):
            for found in _STRING.findall(text):
                if _TELLING.search(found):
                    self._strings[found].add(number)
            for kind, table in _FOUND.items():
                for name, pattern in table.items():
                    for match in pattern.finditer(text):
                        self._seen[kind][name, match[0]].add(number)
        self._look_for_copies(number, row.get("messages") or [])

    def report(self) -> dict[str, Any]:
        """What is left, as plain data: of each level a count and the first of it."""
        rare = sorted(text for text, episodes in self._strings.items() if len(episodes) == 1)
        linking = self._told("identifiers", least=2)
        return {
            "episodes": self._episodes,
            "tokens": {"rare_strings": len(rare), "first": rare[:_SHOWN]},
            "turns": {"verbatim": self._copied, "first": self._verbatim},
            "linked": {
                "identifiers": len(linking),
                "first": linking[:_SHOWN],
                "times": len(self._seen["times"]),
                "first_times": self._told("times")[:_SHOWN],
            },
            "not_looked_for": [
                "paraphrases, initials and names that no rule lists",
                "text in other encodings, reversed, or spelled out with characters between",
                "patterns that are split over turns (words are found)",
                "who wrote it, by style; what prompts of a public data set tell by themselves",
            ],
        }

    def _told(self, kind: str, least: int = 1) -> list[dict[str, Any]]:
        return [
            {"kind": name, "text": text, "episodes": len(episodes)}
            for (name, text), episodes in sorted(
                self._seen[kind].items(), key=lambda each: (-len(each[1]), each[0])
            )
            if len(episodes) >= least
        ]

    def _look_for_copies(self, number: int, messages: list[dict[str, str]]) -> None:
        """Stretches of an answer that stood word for word in an observation before it."""
        before: set[str] = set()
        for message in messages:
            text = " ".join(message["content"].split())
            pieces = {text[at : at + _VERBATIM] for at in range(len(text) - _VERBATIM + 1)}
            if message["role"] != "assistant":
                before |= pieces
                continue
            for stretch in _stretches(text, before):
                self._copied += 1
                if len(self._verbatim) < _SHOWN:
                    self._verbatim.append({"episode": number, "text": stretch})


def _stretches(text: str, before: set[str]) -> Iterator[str]:
    at = 0
    while at + _VERBATIM <= len(text):
        stop = at
        while text[stop : stop + _VERBATIM] in before and stop + _VERBATIM <= len(text):
            stop += 1
        if stop > at:
            yield text[at : stop - 1 + _VERBATIM]
            at = stop + _VERBATIM
        else:
            at += 1


def _texts_of(value: Any) -> Iterator[str]:
    """All texts in plain data, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int | float):
        yield str(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in ("role", "content"):
                yield str(name)
            yield from _texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_of(item)
