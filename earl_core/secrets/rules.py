"""Rules that say what of episodes must not leave the machine, and what they hide.

They come after the redactor, which knows secrets by their looks. Rules find what they name in text
as `lookalikes.plain` has it, words also where they are split over the texts of an episode. What no
rule can find (a paraphrase, another encoding, a name that nobody listed) stays.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import regex
from pydantic import Field, field_validator, model_validator

from earl_core.secrets.expressions import (
    SHORTEST_SPLIT,
    Expression,
    Reading,
    Span,
    Word,
    hidden,
    joined_spans,
)
from earl_core.secrets.lookalikes import plain, unbroken
from earl_core.secrets.patterns import is_reference
from earl_core.secrets.redactor import HIDDEN, redact
from earl_core.secrets.references import resolve
from earl_core.system.errors import ConfigError
from earl_core.system.plural import plural
from earl_core.system.settings import Settings

DROPPED = "(turn dropped)"
LEFT_OUT = "(left out)"

EpisodeField = Literal[
    "iteration", "episode_id", "group_id", "prompt_id", "environment", "outcome", "finish_reason",
    "reward", "scores", "scoring", "messages", "closing",
]  # fmt: skip
"""Fields of an episode that leaves the machine."""

_OF_OTHERS = ("environment", "outcome", "finish_reason", "scores", "scoring")
"""Fields that environments and reward functions fill; the rest are numbers of ours, or texts."""


class PatternRule(Settings):
    """Text that a regular expression finds."""

    name: str = Field(min_length=1, description="What it is called in reports.")
    match: str = Field(min_length=1, description="Regular expression, of Python's kind.")
    replace: str = Field(default=HIDDEN, description="Text in the place of what it finds.")
    hash: bool = Field(
        default=False,
        description="True: a keyed hash takes the place, the same for the same text, so that what "
        "belongs together can be told without being known.",
    )

    @field_validator("match")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        return _checked(value)


class RedactionRules(Settings):
    """What is hidden in episodes before others see them."""

    words: tuple[str, ...] = Field(
        default=(),
        description="Texts that are hidden wherever they stand, in any case, with accents or "
        "without, with letters that look alike, and split over turns.",
    )
    patterns: tuple[PatternRule, ...] = Field(default=(), description="Expressions to be hidden.")
    drop_turns: tuple[str, ...] = Field(
        default=(),
        description="Regular expressions, found as patterns are: a turn that one of them finds "
        "loses what was observed and what was answered.",
    )
    drop_fields: tuple[EpisodeField, ...] = Field(
        default=(), description="Fields of episodes that are left out."
    )
    hash_fields: tuple[EpisodeField, ...] = Field(
        default=(), description="Fields in whose place a keyed hash stands."
    )
    key: str | None = Field(
        default=None,
        description="Key of the hashes, as a reference (env:NAME or file:PATH). Whoever has it can "
        "find out values by trying them.",
    )

    @field_validator("drop_turns")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_checked, value))

    @field_validator("words")
    @classmethod
    def _are_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            if not plain(word).text.strip():
                raise ValueError(f"the word {word!r} is empty: name a text")
        return value

    @model_validator(mode="after")
    def _has_key(self) -> RedactionRules:
        hashes = bool(self.hash_fields) or any(rule.hash for rule in self.patterns)
        if hashes and self.key is None:
            raise ValueError(
                "hash_fields, and patterns with hash: true, need a key: set key to env:NAME or "
                "file:PATH"
            )
        if self.key is not None and not is_reference(self.key):
            raise ValueError("key is no reference: write env:NAME or file:PATH, not the key")
        if "reward" in self.hash_fields:
            raise ValueError("a hash of the reward tells nothing: put it into drop_fields")
        if both := set(self.drop_fields) & set(self.hash_fields):
            raise ValueError(f"{min(both)} is in drop_fields and in hash_fields: choose one")
        names = [rule.name for rule in self.patterns]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two patterns are called {twice}: give each a name of its own")
        if not any(value for name, value in self if name != "key"):
            raise ValueError("there is no rule: name words, patterns, turns or fields")
        return self


_SENTENCES = (
    "They said that nobody knew",
    "QUICK brown foxes jump over dogs",
    "we will have three more of those",
    "Bitte kommen Sie morgen früh wieder",
)
"""Sentences without a word in common: rules that leave less than `_LEAST` of each hide all that
anybody says."""
_LEAST = 0.25


def _checked(pattern: str) -> str:
    try:
        found = re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    if found.search("") is not None:
        raise ValueError(f"{pattern!r} finds the empty text, and so all: say what it is to find")
    return pattern


class Redaction:
    """Applies rules to one episode after the other. rules: None: the redactor alone. found: how
    often each rule has hidden something, rules that have hidden nothing among them. Raises
    `ConfigError` for a key that is not there, and for rules that hide every word, those of our own
    warnings among them."""

    def __init__(self, rules: RedactionRules | None = None) -> None:
        self.given = rules is not None
        self.rules = rules = rules or RedactionRules.model_construct()
        self.found: Counter[str] = Counter()
        self.characters, self.kept = 0, False
        self._key = b"" if rules.key is None else str(resolve(rules.key)).encode()
        if not any(map(self._leaves, _SENTENCES)):
            raise ConfigError(
                "the rules hide every word: say what is to be hidden, and (?-i:...) around what "
                "tells capitals apart in a pattern"
            )
        self.found = Counter(dict.fromkeys(self._names(), 0))

    def _leaves(self, text: str) -> bool:
        """Whether something of the text is shown."""
        dropped = any(pattern.search(text) for pattern in self._turns)
        return not dropped and _shown_share(text, self._spans(text)) >= _LEAST

    def _names(self) -> Iterable[str]:
        yield from (f"word {number + 1}" for number in range(len(self.rules.words)))
        yield from (f"pattern {rule.name}" for rule in self.rules.patterns)
        yield from (f"turns {number + 1}" for number in range(len(self.rules.drop_turns)))

    @property
    def unused(self) -> list[str]:
        """Rules that have hidden nothing."""
        return [name for name, times in self.found.items() if not times]

    def told(self) -> list[str]:
        """Sentences about rules that have hidden nothing, and about those that took too long, where
        there are some."""
        said = []
        if self.unused and self.characters:
            names = ", ".join(self.unused)
            said.append(f"rules of redaction found nothing in what was shown: {names}")
        for name, times in self.slow.items():
            said.append(
                f"{name} of the rules of redaction took too long over {plural(times, 'text')}, of "
                "which it hid all: write it without repetitions inside of repetitions"
            )
        return said

    @property
    def slow(self) -> dict[str, int]:
        """Texts that rules took too long for."""
        names = list(self._names())[len(self.rules.words) :]
        expressions = [*self._patterns, *self._turns]
        return {n: each.slow for n, each in zip(names, expressions, strict=True) if each.slow}

    def check_something_left(self) -> None:
        """Raise `ConfigError` where there were texts of episodes, and nothing is left of any."""
        if self.characters > 0 and not self.kept:
            raise ConfigError(
                "the rules leave nothing of any text: name what is to be hidden, or drop the "
                "fields `messages` and `closing`"
            )

    def episode(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """A kept episode (`run.kept_episodes`) as it may leave the run directory: fields that are
        left out are None or empty, their messages `LEFT_OUT`; those that are hashed are texts."""
        found = {**episode, "texts": self._texts(episode["texts"])}
        for name in _OF_OTHERS:
            if name in found:
                found[name] = self._value(found[name])
        said = 2 * len(found["turn_rewards"])
        for name in (*self.rules.drop_fields, *self.rules.hash_fields):
            if name in found:
                found[name] = self.field(name, found[name])
            if name in ("messages", "closing"):
                part = slice(said) if name == "messages" else slice(said, None)
                found["texts"][part] = [
                    self.field(name, text) or LEFT_OUT for text in found["texts"][part]
                ]
            if name == "reward":
                found["turn_rewards"] = [None] * len(found["turn_rewards"])
        return found

    def field(self, name: EpisodeField, value: Any) -> Any:
        """A field of an episode by the rules for fields: None, of a text "", where it is left out,
        and a text where it is hashed."""
        if name in self.rules.drop_fields:
            return "" if isinstance(value, str) else None
        return self.hashed([name, value]) if name in self.rules.hash_fields else value

    def shown_ids(self, episodes: Iterable[int]) -> str:
        """Ids of episodes as they may leave the run directory, in a line; empty: they may not."""
        shown = (self.field("episode_id", each) for each in episodes)
        return ", ".join(str(each) for each in shown if each is not None)

    def hide(self, text: str) -> str:
        """A text that is no episode's own, such as an error that quotes one. What a rule for turns
        finds is left out whole."""
        for number, pattern in enumerate(self._turns):
            if pattern.search(text):
                self.found[f"turns {number + 1}"] += 1
                return DROPPED
        return hidden(text, self._spans(text))

    def _texts(self, texts: Sequence[str]) -> list[str]:
        """The texts of an episode, observation and answer in turn, and what was said at its end."""
        given, whole = list(texts), "\n".join(texts)
        if redact(whole) != whole:
            given = [redact(text) for text in texts]
        given = self._without_turns(given)
        holes = [self._spans(text) for text in given]
        for number, start, stop in self._split(given):
            holes[number].append((start, stop, HIDDEN))
        for before, spans, kept in zip(texts, holes, given, strict=True):
            self.characters += len(before)
            self.kept = self.kept or (kept != DROPPED and _shown_share(kept, spans) > 0)
        return [hidden(text, spans) for text, spans in zip(given, holes, strict=True)]

    def _value(self, value: Any) -> Any:
        """Plain data with all its text and numbers looked at, names included."""
        if isinstance(value, dict):
            return {self._value(name): self._value(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        if isinstance(value, bool) or value is None:
            return value
        text = value if isinstance(value, str) else json.dumps(value)
        shown = self.hide(redact(text))
        return value if shown == text else shown

    def hashed(self, value: Any) -> str:
        """16 hexadecimal digits for a value, by HMAC-SHA256 with the key."""
        text = json.dumps(value, sort_keys=True)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()[:16]

    def _spans(self, text: str) -> list[tuple[int, int, str]]:
        return [(*span, self._instead(rule, text[slice(*span)])) for rule, span in self._seen(text)]

    def _without_turns(self, texts: list[str]) -> list[str]:
        for number, pattern in enumerate(self._turns):
            for turn in range(0, len(texts), 2):
                if any(pattern.search(text) for text in texts[turn : turn + 2]):
                    self.found[f"turns {number + 1}"] += 1
                    texts[turn : turn + 2] = [DROPPED] * len(texts[turn : turn + 2])
        return texts

    def _seen(self, text: str) -> list[tuple[PatternRule | None, Span]]:
        """What the rules find in one text, by the rule; None: a word."""
        reading = Reading(text)
        found: list[tuple[PatternRule | None, Span]] = []
        joined = unbroken(text) if self._words else None
        for number, word in enumerate(self._words):
            spans = word.spans(reading, joined)
            self.found[f"word {number + 1}"] += len(spans)
            found += [(None, span) for span in spans]
        for rule, expression in zip(self.rules.patterns, self._patterns, strict=True):
            spans = expression.spans(reading)
            self.found[f"pattern {rule.name}"] += len(spans)
            found += [(rule, span) for span in spans]
        return found

    def _split(self, texts: Sequence[str]) -> Iterable[tuple[int, int, int]]:
        """Parts of words that are split over texts: the text's number, start and stop. Observations
        and answers are read one after the other, and all together."""
        for numbers in (range(0, len(texts), 2), range(1, len(texts), 2), range(len(texts))):
            kept = [number for number in numbers if texts[number] != DROPPED]
            parts = [unbroken(texts[number]) or plain(texts[number]) for number in kept]
            # Where each begins: in itself without its first white space, and in the whole.
            firsts = [len(part.text) - len(part.text.lstrip()) for part in parts]
            bodies = [part.text.strip() for part in parts]
            starts = [0, *itertools.accumulate(map(len, bodies))]
            whole = "".join(bodies)
            for number, word in enumerate(self._words):
                for begin, end in word.within(whole):
                    one, other = bisect_right(starts, begin) - 1, bisect_right(starts, end - 1) - 1
                    if end - begin < SHORTEST_SPLIT or one == other:
                        continue
                    self.found[f"word {number + 1}"] += 1
                    for at in range(one, other + 1):
                        first = firsts[at] + max(begin - starts[at], 0)
                        stop = firsts[at] + min(end - starts[at], len(bodies[at]))
                        if first < stop:
                            yield (kept[at], *parts[at].span(first, stop))

    def _instead(self, rule: PatternRule | None, text: str) -> str:
        if rule is None:
            return HIDDEN
        return f"({rule.name} {self.hashed(text)})" if rule.hash else rule.replace

    @cached_property
    def _words(self) -> list[Word]:
        return [Word(word) for word in self.rules.words]

    @cached_property
    def _patterns(self) -> list[Expression]:
        return [Expression(rule.match) for rule in self.rules.patterns]

    @cached_property
    def _turns(self) -> list[Expression]:
        return [Expression(pattern) for pattern in self.rules.drop_turns]


def _shown_share(text: str, spans: Iterable[tuple[int, int, str]]) -> float:
    """The share of a text's letters and digits that lie in no span."""
    shown = list(text)
    for start, stop in joined_spans([(a, b) for a, b, _ in spans]):
        shown[start:stop] = " " * (stop - start)
    letters = sum(map(str.isalnum, text))
    return sum(map(str.isalnum, shown)) / letters if letters else 1.0
