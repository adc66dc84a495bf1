"""Special tokens: the template's own are tokens, those that a message or a tool's schema quotes are
text.

A page from the net, a tool's output or its description may hold `<|im_end|>`. Read as a token it
would end the turn and let the page speak as the system. So such texts are replaced before the
template renders the message, and encoded as plain text afterwards. Tokenizers split texts at
special tokens anyway, so that nothing else changes its tokens by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from earl_core.environments.base import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Around the number of a quoted text; of Unicode's private use, and quoted themselves."""


class SpecialTokens:
    """Of one tokenizer. ids: all of them. mark: a text that is quoted as they are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mark: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if getattr(token, "special", False)}
        self.ids = frozenset(tokenizer.all_special_ids) | special
        texts = {mark, *(str(tokenizer.convert_ids_to_tokens(number)) for number in self.ids)}
        # The longest first: one may begin another.
        self._texts = [_OPEN, *sorted(texts - {""}, key=lambda text: (-len(text), text))]
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._any = re.compile("|".join(map(re.escape, self._texts)))
        # An answer may hold any number between such marks: it is text.
        numbers = "|".join(map(str, range(len(self._texts))))
        self._marked = re.compile(f"{_OPEN}({numbers}){_CLOSE}")

    def quoted(self, message: Message) -> Message:
        """The message with the texts of special tokens replaced. An answer's may be its own."""
        if message["role"] == "assistant" or not self._any.search(message["content"]):
            return message
        quoted = message.copy()
        quoted["content"] = self._replaced(message["content"])
        return quoted

    def quoted_schemas(self, schemas: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The same of tools, whose descriptions come from elsewhere, too."""
        text = json.dumps(schemas, ensure_ascii=False)
        return json.loads(self._replaced(text)) if self._any.search(text) else schemas

    def _replaced(self, text: str) -> str:
        return self._any.sub(lambda found: f"{_OPEN}{self._numbers[found[0]]}{_CLOSE}", text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a template's text; special tokens are recognised, but quoted ones are not;
        none are added."""
        parts: Sequence[str] = self._marked.split(text)
        tokens: list[int] = []
        for place, part in enumerate(parts):
            quoted = place % 2 == 1
            piece = self._texts[int(part)] if quoted else part
            if piece:
                tokens += self._tokenizer.encode(
                    piece, add_special_tokens=False, split_special_tokens=quoted
                )
        return tokens
