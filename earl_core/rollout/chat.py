"""Chat over token ids: tokens in, tokens out.

What the model sampled is never decoded and encoded again. The next prompt of a conversation is
what stands there already plus the tokens that the chat template puts after an answer: its
end-of-turn, the new messages, and the header of the next answer. They are found once per template
by rendering a dummy conversation and cutting after the dummy answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from earl_core.environments.base import Message
from earl_core.rollout.sized_cache import SizedCache
from earl_core.rollout.special_tokens import SpecialTokens
from earl_core.rollout.tool_calls import NO_TOOLS, Answer, ToolParser, Tools, call_id, parser_of
from earl_core.rollout.tool_prompt import in_words
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %} {{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Used when neither the tokenizer nor the configuration has a chat template. The space before an
answer is left to the model: most vocabularies join it to the first word."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MARK = "earlanswermark"
_QUESTION: Message = {"role": "user", "content": "question"}
_CACHED_ANSWER_LENGTH = 8
_MOST_TOOLS = 256

_TOOL = Tools(
    [
        {
            "type": "function",
            "function": {
                "name": "earltoolmark",
                "description": "A tool.",
                "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
            },
        }
    ]
)
_RESULT: Message = {"role": "tool", "content": "1", "tool_call_id": call_id(0), "name": "tool"}

_Key = tuple[str, ...]


class ChatTokenizer:
    """One tokenizer and one chat template.

    tokenizer: a transformers tokenizer.
    answer_prefix: text that every answer begins with; it is given to the model, not sampled.
    stop: strings of one token each that end an answer, besides end-of-turn and end-of-text.
    tool_format: of `tool_calls.FORMATS`, or auto.
    Raises `ConfigError` for templates that fail or lose answers and for stop strings that
    are not one token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        answer_prefix: str = "",
        stop: Sequence[str] = (),
        tool_format: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template or PLAIN_TEMPLATE
        self._tool_format = tool_format
        self.vocabulary = len(tokenizer)
        self._special = SpecialTokens(tokenizer, _MARK)
        self.answer_prefix = answer_prefix
        self.prefix_tokens = self.encode(answer_prefix) if answer_prefix else []
        names = tokenizer.get_vocab()
        self.longest = max(map(len, names))
        """Characters that one token may stand for."""
        self._bytes = frozenset(number for name, number in names.items() if _BYTE.fullmatch(name))
        self._first: SizedCache[_Key, list[int]] = SizedCache()
        self._following: SizedCache[_Key, list[int]] = SizedCache()
        self._texts: SizedCache[tuple[int, ...], str] = SizedCache()
        closing = self._after_answer([], NO_TOOLS, add_generation_prompt=False)
        self._end_of_turn = self.encode(closing) if closing else []
        self._stable = {NO_TOOLS.key: self._probe_stability(NO_TOOLS)}
        self.stop_token_ids = self._stop_tokens(stop)

    def prefix_stable(self, tools: Tools = NO_TOOLS) -> bool:
        """Whether the template keeps earlier answers in place as a conversation goes on."""
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
            _key(messages, tools),
            lambda: self.encode(self._after_answer(messages, tools)) + self.prefix_tokens,
        )
        return tokens[self._overlap(sampled, tokens) :]

    def read(self, sampled: Sequence[int], tools: Tools = NO_TOOLS) -> Answer:
        """An answer and the calls of tools in it; without tools none are looked for."""
        text = self.text_of(sampled)
        if not tools:
            return Answer(text, text)
        raw, parser = self.raw_text_of(sampled), self.parser
        try:
            beside, calls = parser.parse(raw, tools)
        except ValueError as error:
            return Answer(text, raw, error=str(error))
        return Answer(beside if calls else text, raw, calls)

    def text_of(self, sampled: Sequence[int]) -> str:
        """An answer as text for environments: the prefix in front, special tokens dropped."""
        if len(sampled) > _CACHED_ANSWER_LENGTH:
            return self._decode_answer(list(sampled))
        return self._texts.of(tuple(sampled), lambda: self._decode_answer(list(sampled)))

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
        tokens = list(sampled)
        while tokens and tokens[-1] in self.stop_token_ids and tokens[-1] in self._special.ids:
            tokens.pop()
        return self.answer_prefix + self._decode(tokens, skip_special_tokens=False)

    @cached_property
    def parser(self) -> ToolParser:
        """Of the calls in answers. Raises `ConfigError` where the model's form is not known."""
        template = str(self._template)
        return parser_of(self._tokenizer, template, self._tool_format, self._knows_tools)

    @cached_property
    def _knows_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return "earltoolmark" in self._apply([_QUESTION], _TOOL)

    @cached_property
    def _knows_system(self) -> bool:
        try:
            told = "earlsystemmark"
            return told in self.render([{"role": "system", "content": told}, _QUESTION])
        except ConfigError:
            return False

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = NO_TOOLS,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text of a conversation, by default ending where an answer begins; for
        `encode`, because special tokens that messages or tools quote are replaced in it."""
        messages = [self._special.quoted(message) for message in messages]
        if tools:
            tools = Tools(self._special.quoted_schemas(tools.schemas))
        used = tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if used and not self._knows_tools:
            messages, tools = in_words(messages, tools, self._knows_system), NO_TOOLS
        return self._apply(messages, tools, add_generation_prompt)

    def _apply(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = True
    ) -> str:
        try:
            text: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools.schemas) or None,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template cannot render messages with the roles {roles}: {error}. Use "
                "an environment that sends only roles the template knows, or set "
                "model.chat_template to a Jinja file that does"
            ) from error
        return str(text)

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
        """What the template puts after an answer that these messages follow."""
        text = self.render([*_answered(_MARK), *messages], tools, add_generation_prompt)
        before, found, after = text.partition(_MARK)
        if not found or _MARK in after:
            raise ConfigError(
                f"the chat template renders an answer {text.count(_MARK)} times instead of once, "
                f"so what follows an answer is unknown (after {before[-40:]!r}): set "
                "model.chat_template to a Jinja file that keeps the assistant's content as it is"
            )
        return after

    def _overlap(self, sampled: Sequence[int], following: list[int]) -> int:
        longest = min(len(self._end_of_turn), len(sampled), len(following))
        for size in range(longest, 0, -1):
            if list(sampled[-size:]) == following[:size]:
                return size
        return 0

    def _probe_stability(self, tools: Tools) -> bool:
        """Whether an answer stays in place, unchanged, when the conversation goes on."""
        followed = [[_QUESTION], [*_answered("answer"), _QUESTION]]
        if tools:
            followed += [[_RESULT], [_RESULT, *_answered("answer")[1:], _QUESTION]]
        for content in (_MARK, f"<think>\n{_MARK}\n</think>\n\nanswer"):
            text = self.render(_answered(content), tools, add_generation_prompt=False)
            start, kept, _ = text.partition(content)
            for following in followed:
                longer = self.render([*_answered(content), *following], tools)
                if not kept or not longer.startswith(start + content):
                    return False
        return True

    def _stop_tokens(self, stop: Sequence[str]) -> tuple[int, ...]:
        found: list[int] = []
        if self._end_of_turn and self._end_of_turn[0] in self._special.ids:
            found.append(self._end_of_turn[0])
        if self._tokenizer.eos_token_id is not None:
            found.append(int(self._tokenizer.eos_token_id))
        found.extend(self._single_token(text) for text in stop)
        return tuple(dict.fromkeys(found))

    def _single_token(self, text: str) -> int:
        tokens = self.encode(text)
        if len(tokens) == 1 and tokens[0] != self._tokenizer.unk_token_id:
            return tokens[0]
        known = self._tokenizer.get_vocab().get(text)
        if known is not None:
            return int(known)
        raise ConfigError(
            f"rollout.stop holds {text!r}, which is {len(tokens)} tokens for this tokenizer: give "
            "strings that are one token each, or leave it out and end answers by "
            "rollout.max_tokens_per_turn"
        )


class Conversation:
    """The token side of one episode: which tokens come next, and whether a new sample begins.

    With a template that keeps earlier answers in place (`ChatTokenizer.prefix_stable`) a next
    prompt always extends the tokens before it. With one that rewrites them (drops reasoning, say)
    the conversation is rendered again each turn, and where that does not extend what stands
    there, a new sample begins with the whole conversation. Answers without reasoning are rendered
    as marks: templates write calls of tools anew, with other spaces than the model's.
    """

    def __init__(self, chat: ChatTokenizer, tools: Tools = NO_TOOLS) -> None:
        self._chat = chat
        self._tools = tools
        self._messages: list[Message] = []
        self._text = ""
        self._marked: dict[str, str] = {}
        self._calls = 0
        if tools:
            # Raises what is wrong with them before anything is sampled.
            _ = chat.parser

    def copy(self) -> Conversation:
        """Another one that stands where this one does."""
        other = Conversation(self._chat, self._tools)
        other._messages, other._text = list(self._messages), self._text
        other._calls, other._marked = self._calls, dict(self._marked)
        return other

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """The first prompt."""
        if not self._chat.prefix_stable(self._tools):
            self._messages = list(messages)
            self._text = self._chat.render(messages, self._tools)
        return self._chat.first_prompt(messages, self._tools)

    def read(self, sampled: Sequence[int]) -> Answer:
        """An answer and the calls of the conversation's tools in it."""
        return self._chat.read(sampled, self._tools)

    def message(self, answer: Answer) -> Message:
        """An answer as a message; its calls are numbered through the conversation."""
        first, self._calls = self._calls, self._calls + len(answer.calls)
        return answer.message(first)

    def complaint(self, answer: Answer) -> Message:
        """What the model is told whose calls could not be read."""
        text = f"Error: the call could not be read: {answer.error}"
        number, self._calls = self._calls, self._calls + 1
        name = self._tools.schemas[0]["function"]["name"]
        return Message(role="tool", content=text, tool_call_id=call_id(number), name=name)

    def follow(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[list[int], bool]:
        """Tokens after an answer, and whether they begin a new sample (then they are a whole
        prompt) or extend the tokens before them."""
        chat = self._chat
        if chat.prefix_stable(self._tools):
            return chat.next_prompt(sampled, messages, self._tools), False
        answer = content = chat.raw_text_of(sampled)
        if "think>" not in answer:
            content = f"{_MARK}{len(self._messages)}."
            self._marked[content] = answer
        self._messages += [{"role": "assistant", "content": content}, *messages]
        standing, self._text = self._text, chat.render(self._messages, self._tools)
        before, found, after = self._text[len(standing) :].partition(content)
        if not self._text.startswith(standing) or not found or before.strip():
            whole = self._text
            for mark, said in self._marked.items():
                whole = whole.replace(mark, said)
            return chat.encode(whole) + chat.prefix_tokens, True
        tokens = chat.encode(after) + chat.prefix_tokens
        if sampled and tokens and sampled[-1] == tokens[0] and tokens[0] in chat.stop_token_ids:
            tokens = tokens[1:]
        return tokens, False


def _answered(content: str) -> list[Message]:
    return [_QUESTION, {"role": "assistant", "content": content}]


def _key(messages: Sequence[Message], tools: Tools) -> _Key:
    key = [tools.key]
    for message in messages:
        key += [message["role"], message["content"]]
        if len(message) > 2:
            key.append(json.dumps(message))
    return tuple(key)
