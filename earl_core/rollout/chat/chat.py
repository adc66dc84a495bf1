"""Chat over token ids: tokens in, tokens out.

Sampled tokens are never decoded and encoded again. The next prompt of a conversation is what stands
there already plus the tokens that the chat template puts after an answer: its end-of-turn, the new
messages, and the header of the next answer. They are found once per template by rendering a dummy
conversation and cutting after the dummy answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from earl_core.environments.base import Message, ToolCall
from earl_core.rollout.chat.chat_template import QUESTION, RESULT, TOOL, ChatTemplate, called
from earl_core.rollout.chat.disguise import Sampled
from earl_core.rollout.chat.sized_cache import SizedCache
from earl_core.rollout.chat.special_tokens import SpecialTokens
from earl_core.rollout.chat.token_texts import TokenTexts
from earl_core.rollout.chat.tool_calls import (
    NO_TOOLS,
    Answer,
    ToolParser,
    Tools,
    in_words,
    parser_of,
)
from earl_core.rollout.chat.turn_ends import StopStrings, TurnEnds, cut
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x[0-9A-F]{2}>")
MARK = "earlanswermark"
"""Stands for an answer while a template renders."""
_CACHED_ANSWER_LENGTH = 8
_MOST_TOOLS = 256

_Key = tuple[str, ...]


class ChatTokenizer:
    """One tokenizer and one chat template.

    tokenizer: a transformers tokenizer.
    answer_prefix: text that every answer begins with; it is given to the model, not sampled.
    stop: strings that end an answer, besides end-of-turn and end-of-text; its text keeps them.
    tool_format: of `tool_calls.FORMATS`, or auto.
    eos_token_ids: that the model names beside the tokenizer's own.
    rows: of the model's embeddings, which may be more than the tokenizer has tokens.
    template_options: variables that the template is told in every conversation.
    Raises `ConfigError` for templates that fail or lose answers, and for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        answer_prefix: str = "",
        stop: Sequence[str] = (),
        tool_format: str = "auto",
        eos_token_ids: Sequence[int] = (),
        rows: int = 0,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template_options)
        self._tool_format = tool_format
        self.vocabulary = rows or len(tokenizer)
        """Number of tokens that the policy may sample."""
        self.unknown_token: int | None = tokenizer.unk_token_id
        """What stands for characters that the vocabulary lacks, if it has such a token."""
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        texts_end = tuple(dict.fromkeys([*own, *eos_token_ids]))
        self._special = SpecialTokens(tokenizer, self._template.written, MARK, texts_end)
        self.token_texts = TokenTexts(tokenizer)
        self.answer_prefix = answer_prefix
        self.prefix_tokens = self.encode(answer_prefix) if answer_prefix else []
        names = tokenizer.get_vocab()
        self.longest = max(map(len, names))
        """Characters that one token may stand for."""
        self._bytes = frozenset(number for name, number in names.items() if _BYTE.fullmatch(name))
        self._first: SizedCache[_Key, list[int]] = SizedCache()
        self._following: SizedCache[_Key, list[int]] = SizedCache()
        self._texts: SizedCache[tuple[int, ...], str] = SizedCache()
        self._ends = self._turn_ends(texts_end)
        asked = {text: self._single_token(text) for text in stop}
        single = [token for token in asked.values() if token is not None]
        self.stop_token_ids = tuple(dict.fromkeys([*self._ends.ids, *single]))
        self._stop = [text for text, token in asked.items() if token is None]
        self.ends = self.ends_by(())
        """What ends answers beside these tokens."""
        self._stable = {NO_TOOLS.key: self._probe_stability(NO_TOOLS)}

    def prefix_stable(self, tools: Tools = NO_TOOLS) -> bool:
        """Tell whether the template keeps earlier answers in place as a conversation goes on."""
        if tools.key not in self._stable:
            if len(self._stable) == _MOST_TOOLS:
                self._stable.clear()
            self._stable[tools.key] = self._probe_stability(tools)
        return self._stable[tools.key]

    def first_prompt(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> list[int]:
        """Tokens of the first messages, the header of the answer and its prefix."""
        return list(
            self._first.of(
                _key(messages, tools),
                lambda: self.encode(self.render(messages, tools)) + self.prefix_tokens,
            )
        )

    def next_prompt(
        self, sampled: Sequence[int], messages: Sequence[Message], tools: Tools = NO_TOOLS
    ) -> list[int]:
        """The tokens that follow an answer: only what the template adds after it.

        sampled: the answer's sampled tokens (prefix not included). End-of-turn tokens at its end
        are not repeated; those that were not sampled (the answer hit its budget) are added.
        """
        tokens = self._following.of(
            _key(messages, tools), lambda: self.encode(self._after_answer(messages, tools))
        )
        return self.next_tokens(sampled, tokens)

    def next_tokens(self, sampled: Sequence[int], following: list[int]) -> list[int]:
        """The same of the tokens that follow an answer in the template's text."""
        return following[self._ends.overlap(sampled, following) :] + self.prefix_tokens

    def ends_by(self, stop: Sequence[str]) -> StopStrings | None:
        """What ends answers by these strings, too; see `GenerationRequest.ends`."""
        sought = [*self._stop, *stop]
        return StopStrings(sought, self.token_texts) if sought else None

    def read(
        self,
        sampled: Sequence[int],
        tools: Tools = NO_TOOLS,
        stop: Sequence[str] = (),
        opening: Sequence[int] = (),
    ) -> Answer:
        """An answer and the calls of tools in it; without tools none are looked for.

        stop: strings before which its texts are cut. opening: its first tokens, in which these are
        not looked for.
        """
        text, stopped_by = cut(self.text_of(sampled), stop, len(self.text_of(opening)))
        if not tools:
            return Answer(text, text, stopped_by=stopped_by)
        raw, _ = cut(self.raw_text_of(sampled), stop, len(self.raw_text_of(opening)))
        # A format that is configured wrongly is no error of the answer.
        parser = self.parser
        try:
            beside, calls = parser.parse(raw, tools)
        except ValueError as error:
            return Answer(text, raw, error=str(error), stopped_by=stopped_by)
        return Answer(beside if calls else text, raw, calls, stopped_by=stopped_by)

    def answer_of(self, sampled: Sequence[int]) -> list[int]:
        """An answer's tokens without what ends the turn."""
        return list(self._ends.cut(sampled))

    def text_of(self, sampled: Sequence[int]) -> str:
        """An answer as text for environments: the prefix in front, special tokens and what ends the
        turn dropped."""
        said = list(self._ends.cut(sampled))
        if len(said) > _CACHED_ANSWER_LENGTH:
            return self._decode_answer(said)
        return self._texts.of(tuple(said), lambda: self._decode_answer(said))

    def beginning_of(self, sampled: Sequence[int]) -> str:
        """The text that every answer has in front that begins with these tokens: no character that
        the next tokens may complete."""
        known = len(sampled)
        # Bytes that a vocabulary has beside its words are decoded together, across what is dropped.
        while known and (
            sampled[known - 1] in self._bytes or sampled[known - 1] in self._special.ids
        ):
            known -= 1
        return self.text_of(sampled[:known]).rstrip("\ufffd") if known else ""

    def raw_text_of(self, sampled: Sequence[int]) -> str:
        """An answer as a template wants it back: end-of-turn cut off, other specials kept."""
        tokens = list(self._ends.cut(sampled))
        while tokens and tokens[-1] in self.stop_token_ids and tokens[-1] in self._special.ids:
            tokens.pop()
        return self.answer_prefix + self._decode(tokens, skip_special_tokens=False)

    @cached_property
    def parser(self) -> ToolParser:
        """Make the parser of the calls in answers. Raises `ConfigError` where the model's form is
        not known."""
        template = self._template
        return parser_of(self._tokenizer, template.sources, self._tool_format, template.knows_tools)

    @property
    def knows_tools(self) -> bool:
        """Whether the template tells the model of tools in a form of its own."""
        return self._template.knows_tools

    @property
    def template_options(self) -> frozenset[str]:
        """Names of variables that a conversation may give the chat template."""
        return self._template.options

    @property
    def reasons(self) -> bool:
        """Whether the template knows reasoning between `<think>` and `</think>`."""
        return "<think>" in self._template.sources or "</think>" in self._template.sources

    def outside(self, text: str) -> list[int]:
        """Tokens of a text that somebody else has put into the model's mouth: none is a control
        token."""
        return self.encode(self._special.quoted(text))

    def own(self, sampled: str) -> str:
        """A text of the policy's as the content of a message: its tokens stay tokens."""
        return self._special.own(sampled)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = NO_TOOLS,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text of a conversation, by default ending where an answer begins; for
        `encode`: control tokens in texts that are not the policy's `own` are quoted in it."""
        disguise = self._special.disguise((messages, tools.schemas, tools.options))
        if not self._template.knows_reasoning and any("reasoning_content" in m for m in messages):
            raise ConfigError(
                "the chat template does not read reasoning_content: write reasoning into the "
                "message's content, between <think> and </think>, or leave it out"
            )
        try:
            hidden = [disguise.message(message) for message in messages]
            if tools or tools.options:
                hidden_options = disguise.value(tools.options)
                tools = Tools(disguise.schemas(tools.schemas), hidden_options)
            used = tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
            if used and not self._template.knows_tools:
                hidden = in_words(hidden, tools, self._template.knows_system)
                tools = Tools((), tools.options)
            text = self._template.apply(hidden, tools, add_generation_prompt)
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template cannot render messages with the roles {roles}: "
                f"{disguise.removed(str(error))}. Use "
                "an environment that sends only roles the template knows, or set "
                "model.chat_template to a Jinja file that does"
            ) from error
        return self._special.undisguised(text, disguise)

    def encode(self, text: str) -> list[int]:
        """Token ids of template text; see `SpecialTokens.encode`."""
        return self._special.encode(text)

    def _decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(
            self._tokenizer.decode(
                tokens,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def _decode_answer(self, tokens: list[int]) -> str:
        prefix = self.prefix_tokens
        # Decoding both together keeps the space that some tokenizers drop from a first token.
        if prefix and self._decode(prefix, skip_special_tokens=True) == self.answer_prefix:
            return self._decode(prefix + tokens, skip_special_tokens=True)
        return self.answer_prefix + self._decode(tokens, skip_special_tokens=True)

    def _after_answer(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = True
    ) -> str:
        """Return the text that the template puts after an answer that these messages follow."""
        plain, calls = _answered(Sampled(MARK)), called(messages)
        try:
            return self._after([*plain, *messages], tools, add_generation_prompt)
        except ConfigError:
            if not calls:
                raise
        # Some templates render results only after the calls that they are of.
        answer = _answered(Sampled(MARK), calls)
        written = self._after(answer, tools, False)
        written = written.removesuffix(self._after(plain, tools, False))
        after = self._after([*answer, *messages], tools, add_generation_prompt)
        if not after.startswith(written):
            raise ConfigError(
                "the chat template writes calls of tools anew once their results follow, so that "
                "what follows an answer is unknown: set model.chat_template to a Jinja file that "
                "keeps them as they are"
            )
        return after.removeprefix(written)

    def _after(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool) -> str:
        text = self.render(messages, tools, add_generation_prompt)
        before, found, after = text.partition(MARK)
        if not found or MARK in after:
            raise ConfigError(
                f"the chat template renders an answer {text.count(MARK)} times instead of once, "
                f"so what follows an answer is unknown (after {before[-40:]!r}): set "
                "model.chat_template to a Jinja file that keeps the assistant's content as it is"
            )
        return after

    def _probe_stability(self, tools: Tools) -> bool:
        """Tell whether prompts and answers stay in place, unchanged, when the conversation goes
        on."""
        followed = [[QUESTION], [*_answered("answer"), QUESTION]]
        if tools:
            followed += [[RESULT], [RESULT, *_answered("answer")[1:], QUESTION]]
        prompt = self.render([QUESTION], tools)
        for content in (Sampled(MARK), Sampled(f"<think>\n{MARK}\n</think>\n\nanswer")):
            text = self.render(_answered(content), tools, add_generation_prompt=False)
            start, kept, _ = text.partition(content)
            if not kept or not (prompt.startswith(start) or start.startswith(prompt)):
                return False
            if not all(self._extends(start, content, each, tools) for each in followed):
                return False
        return True

    def _extends(
        self, start: str, content: str, following: Sequence[Message], tools: Tools
    ) -> bool:
        try:
            longer = self.render([*_answered(content), *following], tools)
        except ConfigError:
            calls = called(following)
            if not calls:
                raise
            longer = self.render([*_answered(content, calls), *following], tools)
        return longer.startswith(start + content)

    def _turn_ends(self, texts_end: Sequence[int]) -> TurnEnds:
        ends = TurnEnds(self._special.ids, self._tokenizer, texts_end)
        for tools in (NO_TOOLS, TOOL) if self._template.knows_tools else (NO_TOOLS,):
            closing = self.encode(self._after_answer([], tools, add_generation_prompt=False))
            if not ends.closes(closing):
                for message in (QUESTION, RESULT) if tools else (QUESTION,):
                    ends.is_followed(self.encode(self._after_answer([message], tools)))
        return ends

    def _single_token(self, text: str) -> int | None:
        tokens = self.encode(text)
        if len(tokens) == 1 and tokens[0] != self._tokenizer.unk_token_id:
            return tokens[0]
        known = self._tokenizer.get_vocab().get(text)
        return None if known is None else int(known)


def _answered(content: str, calls: Sequence[ToolCall] = ()) -> list[Message]:
    answer: Message = {"role": "assistant", "content": content}
    if calls:
        answer["tool_calls"] = list(calls)
    return [QUESTION, answer]


def _key(messages: Sequence[Message], tools: Tools) -> _Key:
    key = [tools.key]
    for message in messages:
        key += [message["role"], message["content"]]
        if len(message) > 2:
            key.append(json.dumps(message))
    return tuple(key)
