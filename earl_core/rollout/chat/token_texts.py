"""Texts and bytes of single tokens, as the log-probs of OpenAI's API name them."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenText(NamedTuple):
    """One token. text: with U+FFFD for parts of characters. content: its bytes; those of all tokens
    of a text are the text's."""

    text: str
    content: bytes


class TokenTexts:
    """The tokens of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        self._known: dict[int, TokenText] = {}

    def of(self, token: int) -> TokenText:
        """A token by its id; one that the tokenizer lacks has no text."""
        if token not in self._known:
            content = self._content(token)
            self._known[token] = TokenText(content.decode(errors="replace"), content)
        return self._known[token]

    def _content(self, token: int) -> bytes:
        name: Any = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in self._added:
            return str(name).encode()
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        decoder, space = self._decoder
        if decoder and all(character in decoder for character in name):
            return bytes(decoder[character] for character in name)
        if space:
            return str(name).replace(space, " ").encode()
        text: Any = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return str(text).encode()

    @cached_property
    def _decoder(self) -> tuple[dict[str, int], str]:
        """The bytes that characters of names stand for, and the character for a space; empty where
        the vocabulary is of another kind."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        form = json.loads(backend.to_str()).get("decoder") if backend is not None else None
        kinds = form.get("decoders", [form]) if form else []
        if any(kind["type"] == "ByteLevel" for kind in kinds):
            return _byte_level(), ""
        for kind in kinds:
            if kind["type"] == "Metaspace":
                return {}, kind.get("replacement", "▁")
            if kind["type"] == "Replace" and kind.get("content") == " ":
                return {}, kind["pattern"].get("String", "")
        return {}, ""


def _byte_level() -> dict[str, int]:
    """The characters by which byte-level vocabularies (GPT-2's and after) name bytes: printable
    ones name themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(256 + number): byte for number, byte in enumerate(others)}
