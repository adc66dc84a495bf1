"""The text of each token, by the tokenizer of a model directory; without transformers or torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST = 8
"""Tokens that one character of text may take, with room to spare."""


def find_token_texts(files: Iterable[Path]) -> TokenTexts | None:
    """Of the first file that is a tokenizer's; None where none is."""
    for file in files:
        try:
            return TokenTexts(Tokenizer.from_file(str(file)))
        except Exception:  # The library raises nothing more exact.
            continue
    return None


class TokenTexts:
    """Pieces of text that together read as the tokenizer decodes the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Some decoders drop the space in front of a text's first token.
        self._anchor = 0
        self._before = self._decode([[0]])[0]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """One text for each token. A character of several tokens stands at its first one."""
        self._learn(tokens)
        found = [self._known[token] for token in tokens]
        at = 0
        while at < len(found):
            if _UNFINISHED in found[at]:
                end, text = self._whole(tokens, at)
                found[at:end] = [text, *[""] * (end - at - 1)]
                at = end
            else:
                at += 1
        return found

    def _learn(self, tokens: Iterable[int]) -> None:
        new = [token for token in set(tokens) if token not in self._known]
        after = self._decode([[self._anchor, token] for token in new])
        alone = self._decode([[token] for token in new])
        for token, longer, short in zip(new, after, alone, strict=True):
            begins = longer.startswith(self._before)
            self._known[token] = longer[len(self._before) :] if begins else short

    def _whole(self, tokens: Sequence[int], at: int) -> tuple[int, str]:
        """Where the character that begins here ends, and its text; one token where none does."""
        for end in range(at + 1, min(len(tokens), at + _LONGEST) + 1):
            text = self._decode([list(tokens[at:end])])[0]
            if _UNFINISHED not in text:
                return end, text
        return at + 1, self._known[tokens[at]]

    def _decode(self, tokens: list[list[int]]) -> list[str]:
        decoded: Any = self._tokenizer.decode_batch(tokens, skip_special_tokens=False)
        return list(decoded)
