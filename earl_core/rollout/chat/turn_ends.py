"""The end of an answer: the tokens that follow it and that the model has sampled itself, and
strings that end it, of any number of tokens.

A turn is ended by a token that the template writes after an answer (`<|im_end|>`), by the end of a
text, by whatever else the model's files name as that, and with templates that write nothing after
an answer by the next message's first token: models of that kind (GLM-4) end a turn by sampling the
next role.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from earl_core.rollout.chat.token_texts import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TurnEnds:
    """The turn ends of one model. control: ids of the control tokens. texts_end: those that end a
    text."""

    def __init__(
        self,
        control: Collection[int],
        tokenizer: PreTrainedTokenizerBase,
        texts_end: Sequence[int],
    ) -> None:
        self._control, self._tokenizer = control, tokenizer
        self._texts_end = list(texts_end)
        self._closing: list[int] = []
        self._closings: list[list[int]] = []

    @property
    def ids(self) -> list[int]:
        """Ids of tokens that end an answer, the template's own first."""
        return list(dict.fromkeys([*self._closing, *self._texts_end]))

    def closes(self, closing: list[int]) -> bool:
        """Learn what the template writes after an answer; whether a control token is in it."""
        self._closings.append(closing)
        at = self._first_control(closing)
        if at is not None:
            self._closing.append(closing[at])
        return at is not None

    def is_followed(self, following: list[int]) -> None:
        """Learn what follows an answer that nothing closes."""
        at = self._first_control(following)
        if at is not None and self._blank(following[:at]):
            self._closing.append(following[at])

    def cut(self, sampled: Sequence[int]) -> Sequence[int]:
        """An answer without what ends it."""
        ends, left = {*self._closing, *self._texts_end}, len(sampled)
        while left and sampled[left - 1] in ends:
            left -= 1
        return sampled[:left]

    def overlap(self, sampled: Sequence[int], following: list[int]) -> int:
        """Count the tokens that follow an answer and stand at its end already.

        Where the template closes an answer with the sampled end, all up to that count: a template
        that has a space in front (Llama 2) would close the answer twice otherwise.
        """
        if sampled and sampled[-1] in self.ids:
            end, at = sampled[-1], self._first_control(following)
            for closing in self._closings:
                pairs = zip(closing, following, strict=False)
                same = [
                    ours for ours, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                ]
                if end in same:
                    return same.index(end) + 1
            if at is not None and following[at] == end and self._blank(following[:at]):
                return at + 1
        longest = max(map(len, self._closings), default=0)
        for size in range(min(longest, len(sampled), len(following)), 0, -1):
            if list(sampled[-size:]) == following[:size]:
                return size
        return 0

    def _first_control(self, tokens: Sequence[int]) -> int | None:
        return next((at for at, token in enumerate(tokens) if token in self._control), None)

    def _blank(self, tokens: list[int]) -> bool:
        return not tokens or not self._tokenizer.decode(tokens).strip()


class StopStrings:
    """Called as `GenerationRequest.ends`, in any thread. sought: none is empty.

    They are sought in the bytes of the sampled tokens, so that neither a string that begins amid a
    token nor a character that is divided among tokens is missed, and no tokenizer is asked while
    an engine samples.
    """

    def __init__(self, sought: Sequence[str], texts: TokenTexts) -> None:
        self.sought = tuple(dict.fromkeys(sought))
        self._bytes = [text.encode() for text in self.sought]
        self._before = max(map(len, self._bytes)) - 1
        self._texts = texts

    def __call__(self, tokens: Sequence[int], seen: int) -> int | None:
        """Number of tokens up to the first that completes one of the strings. seen: how many were
        looked at before."""
        for last in range(seen, len(tokens)):
            tail, at = self._texts.of(tokens[last]).content, last
            needed = self._before + len(tail)
            while at and len(tail) < needed:
                at -= 1
                tail = self._texts.of(tokens[at]).content + tail
            if any(sought in tail[-needed:] for sought in self._bytes if needed):
                return last + 1
        return None


def cut(text: str, sought: Sequence[str], start: int = 0) -> tuple[str, str]:
    """The text before the first of these strings, and that string; the whole text and "" where
    there is none. start: where to begin."""
    found = [(at, each) for each in sought if (at := text.find(each, start)) >= 0]
    if not found:
        return text, ""
    # Of two that begin together the shorter was complete first.
    at, first = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
    return text[:at], first
