"""Special tokens: the template's own are tokens, those that a message quotes are text.

A page from the net, or a tool's output, may hold `<|im_end|>`. Read as a token it would end the
turn and let the page speak as the system. So such texts are replaced before the template renders
the message, and encoded as plain text afterwards. Tokenizers split texts at special tokens anyway,
so that nothing else changes its tokens by it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from earl_core.environments.base import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Around the number of a quoted text; of Unicode's private use, and quoted themselves."""

_QUOTED = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class SpecialTokens:
    """Of one tokenizer. ids: all of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if getattr(token, "special", False)}
        self.ids = frozenset(tokenizer.all_special_ids) | special
        texts = {str(tokenizer.convert_ids_to_tokens(number)) for number in self.ids}
        # The longest first: one may begin another.
        self._texts = [_OPEN, *sorted(texts - {""}, key=lambda text: (-len(text), text))]
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._any = re.compile("|".join(map(re.escape, self._texts)))

    def quoted(self, message: Message) -> Message:
        """The message with the texts of special tokens replaced. An answer's may be its own."""
        if message["role"] == "assistant" or not self._any.search(message["content"]):
            return message
        content = self._any.sub(
            lambda found: f"{_OPEN}{self._numbers[found[0]]}{_CLOSE}", message["content"]
        )
        quoted = message.copy()
        quoted["content"] = content
        return quoted

    def encode(self, text: str) -> list[int]:
        """Token ids of a template's text; special tokens are recognised, but quoted ones are not;
        none are added."""
        parts: Sequence[str] = _QUOTED.split(text)
        tokens: list[int] = []
        for place, part in enumerate(parts):
            quoted = place % 2 == 1
            piece = self._texts[int(part)] if quoted else part
            if piece:
                tokens += self._tokenizer.encode(
                    piece, add_special_tokens=False, split_special_tokens=quoted
                )
        return tokens
