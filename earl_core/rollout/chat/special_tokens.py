"""Control tokens: those of the template are tokens, those that outside texts hold are text.

A page from the net, a tool's output, its name or its schema may hold `<|im_end|>` or `<think>`.
Read as a token it would end the turn, or let the page speak as the system. Outside is whatever this
run's policy has not sampled; control tokens are the special ones and all others that the template
writes.

So that nothing depends on which fields a template prints, and how, the characters that make up
control tokens are replaced in every outside text by others before the template renders it
(`Disguise`). A control token in the rendered text was then written by the template; a text that
would be one with the replaced characters, wholly or in part, is quoted: it stands between marks and
is encoded as plain text. Tokenizers split texts at added tokens anyway, so that nothing else
changes its tokens by it. Last, the tokens themselves are looked at: a normalizer or the vocabulary
may make control tokens of harmless texts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from earl_core.rollout.chat.disguise import Disguise, Sampled, trie_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Characters around the number of a quoted text; of Unicode's private use, and quoted
themselves."""


class SpecialTokens:
    """The special tokens of one tokenizer.

    written: all that its templates hold or write. mark: a text that is quoted as tokens are.
    ends: ids of what ends texts; words among them (a new line) are no control tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        written: str,
        mark: str,
        ends: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if getattr(token, "special", False)}
        special |= set(tokenizer.all_special_ids)
        used = {
            number
            for number, token in added.items()
            if str(token).strip() and str(token) in written
        }
        self.ids = frozenset(special | used | (added.keys() & ends))
        """Ids of all control tokens."""
        # Whatever the vocabulary lacks becomes this one; as a text it is quoted.
        self._formed = self.ids - {tokenizer.unk_token_id}
        names = {number: str(tokenizer.convert_ids_to_tokens(number)) for number in self.ids}
        self._numbers_of = {text: number for number, text in names.items() if text}
        self._texts = [_OPEN, *sorted({mark, *self._numbers_of})]
        self._quotes = {text: f"{_OPEN}{number}{_CLOSE}" for number, text in enumerate(self._texts)}
        self._any = re.compile(trie_pattern(self._texts))
        self._disguise = Disguise(self._texts)
        # A text may hold any number between such marks: it is text.
        numbers = "|".join(map(str, range(len(self._texts))))
        self._marked = re.compile(f"{_OPEN}({numbers}){_CLOSE}")

    def disguise(self, outside: object) -> Disguise:
        """Return the disguise of texts that the template is about to render. outside: what they
        stand in."""
        return self._disguise.fitting(outside)

    def undisguised(self, text: str, disguise: Disguise) -> str:
        """A rendered text with its own characters, control tokens of outside texts quoted."""
        plain = disguise.removed(text)
        if plain == text:
            return text
        parts: list[str] = []
        at = 0
        for found in self._any.finditer(text):
            parts += (self.quoted(plain[at : found.start()]), found[0])
            at = found.end()
        return "".join([*parts, self.quoted(plain[at:])])

    def own(self, sampled: str) -> Sampled:
        """A sampled text as `encode` reads it back."""
        return Sampled(sampled.replace(_OPEN, self._quotes[_OPEN]))

    def encode(self, text: str) -> list[int]:
        """Token ids of a template's text; control tokens are recognised, but quoted ones are not;
        none are added."""
        tokens: list[int] = []
        first, *more = self._marked.split(text)
        standing = [first]
        for number, after in zip(more[::2], more[1::2], strict=True):
            quoted = self._texts[int(number)]
            if quoted in self._numbers_of:
                tokens += self._checked("".join(standing)) + self._plain(quoted)
                standing = [after]
            else:  # no control token, but a mark of ours: text like what is around it
                standing += (quoted, after)
        return tokens + self._checked("".join(standing))

    def quoted(self, text: str) -> str:
        """A text as `encode` reads it back with its control tokens as plain text."""
        return self._any.sub(lambda found: self._quotes[found[0]], text)

    def _checked(self, text: str) -> list[int]:
        """The text's tokens, no control token among them but those that are written in it."""
        if not text:
            return []
        tokens = self._tokens(text)
        written = iter([self._numbers_of.get(found[0]) for found in self._any.finditer(text)])
        # `in` goes on where it has found the one before.
        if all(token in written for token in tokens if token in self._formed):
            return tokens
        tokens, at = [], 0
        for found in self._any.finditer(text):
            tokens += self._plain(text[at : found.start()]) + self._tokens(found[0])
            at = found.end()
        return tokens + self._plain(text[at:])

    def _plain(self, text: str) -> list[int]:
        """Tokens of a text in which nothing is a control token."""
        if not text:
            return []
        tokens = self._tokens(text, split_special_tokens=True)
        if len(text) == 1 or self._formed.isdisjoint(tokens):
            return tokens
        half = len(text) // 2
        return self._plain(text[:half]) + self._plain(text[half:])

    def _tokens(self, text: str, split_special_tokens: bool = False) -> list[int]:
        tokens: Sequence[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return list(tokens)
