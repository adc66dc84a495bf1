"""Strings that end an answer, of any number of tokens.

They are sought in the bytes of the sampled tokens, so that neither a string that begins amid a
token nor a character that is divided among tokens is missed, and no tokenizer is asked while an
engine samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from earl_core.rollout.chat.token_texts import TokenTexts


class StopStrings:
    """Called as `GenerationRequest.ends`, in any thread. sought: none is empty."""

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
