"""The text of each token, by the tokenizer of a model directory; without transformers or torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

UNFINISHED = "\ufffd"
"""Character in the piece of a token that is a part of a character."""

_LONGEST = 8
"""Tokens that one character of text may take, with room to spare."""


def find_token_texts(files: Iterable[Path]) -> TokenTexts | None:
    """Return the texts of the first file that is a tokenizer's; None where none is."""
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
        """One text for each token, whatever stands beside it."""
        new = [token for token in set(tokens) if token not in self._known]
        after = self._decode([[self._anchor, token] for token in new])
        alone = self._decode([[token] for token in new])
        for token, longer, short in zip(new, after, alone, strict=True):
            begins = longer.startswith(self._before)
            self._known[token] = longer[len(self._before) :] if begins else short
        return [self._known[token] for token in tokens]

    def joined(self, tokens: Sequence[int], unfinished: Iterable[int]) -> dict[int, str]:
        """Return the texts at places whose piece is only a part of a character: the whole character
        at the first of its tokens, nothing at the others. unfinished: these places, ascending."""
        found: dict[int, str] = {}
        for at in unfinished:
            if at in found:
                continue
            for end in range(at + 2, min(len(tokens), at + _LONGEST) + 1):
                text = self._decode([list(tokens[at:end])])[0]
                if UNFINISHED not in text:
                    found |= {at: text, **dict.fromkeys(range(at + 1, end), "")}
                    break
        return found

    def _decode(self, tokens: list[list[int]]) -> list[str]:
        decoded: Any = self._tokenizer.decode_batch(tokens, skip_special_tokens=False)
        return list(decoded)
