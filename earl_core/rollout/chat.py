"""Chat over token ids: tokens in, tokens out.

What the model sampled is never decoded and encoded again. The next prompt of a conversation is
what stands there already plus the tokens that the chat template puts after an answer: its
end-of-turn, the new messages, and the header of the next answer. They are found once per template
by rendering a dummy conversation and cutting after the dummy answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from earl_core.environments.base import Message
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

_MARK = "earlanswermark"
_QUESTION: Message = {"role": "user", "content": "question"}
_CACHED_ANSWER_LENGTH = 8
_CACHE_SIZE = 4 * 2**20
_ENTRY_SIZE = 32

_Key = tuple[tuple[str, str], ...]
K = TypeVar("K")
V = TypeVar("V", bound=Sized)


class ChatTokenizer:
    """One tokenizer and one chat template.

    tokenizer: a transformers tokenizer.
    answer_prefix: text that every answer begins with; it is given to the model, not sampled.
    stop: strings of one token each that end an answer, besides end-of-turn and end-of-text.
    Raises `ConfigError` for templates that fail or lose answers and for stop strings that
    are not one token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        answer_prefix: str = "",
        stop: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template or PLAIN_TEMPLATE
        self.answer_prefix = answer_prefix
        self.prefix_tokens = self.encode(answer_prefix) if answer_prefix else []
        self._special = frozenset(tokenizer.all_special_ids) | frozenset(
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if getattr(token, "special", False)
        )
        self._first: _SizedCache[_Key, list[int]] = _SizedCache()
        self._following: _SizedCache[_Key, list[int]] = _SizedCache()
        self._texts: _SizedCache[tuple[int, ...], str] = _SizedCache()
        closing = self._after_answer([], add_generation_prompt=False)
        self._end_of_turn = self.encode(closing) if closing else []
        self.prefix_stable = self._probe_stability()
        self.stop_token_ids = self._stop_tokens(stop)

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the first messages, the header of the answer and its prefix."""
        return list(
            self._first.of(
                _key(messages), lambda: self.encode(self.render(messages)) + self.prefix_tokens
            )
        )

    def next_prompt(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens that follow an answer: only what the template adds after it.

        sampled: the answer's sampled tokens (prefix not included). End-of-turn tokens at its end
        are not repeated; those that were not sampled (the answer hit its budget) are added.
        """
        tokens = self._following.of(
            _key(messages), lambda: self.encode(self._after_answer(messages)) + self.prefix_tokens
        )
        return tokens[self._overlap(sampled, tokens) :]

    def text_of(self, sampled: Sequence[int]) -> str:
        """An answer as text for environments: the prefix in front, special tokens dropped."""
        if len(sampled) > _CACHED_ANSWER_LENGTH:
            return self._decode_answer(list(sampled))
        return self._texts.of(tuple(sampled), lambda: self._decode_answer(list(sampled)))

    def raw_text_of(self, sampled: Sequence[int]) -> str:
        """An answer as a template wants it back: end-of-turn cut off, other specials kept."""
        tokens = list(sampled)
        while tokens and tokens[-1] in self.stop_token_ids and tokens[-1] in self._special:
            tokens.pop()
        return self.answer_prefix + self._decode(tokens, skip_special_tokens=False)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The template's text of a conversation, by default ending where an answer begins."""
        try:
            text: Any = self._tokenizer.apply_chat_template(
                [{"role": m["role"], "content": m["content"]} for m in messages],
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
        """Token ids of template text; special tokens in it are recognised, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

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

    def _after_answer(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """What the template puts after an answer that these messages follow."""
        text = self.render([*_answered(_MARK), *messages], add_generation_prompt)
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

    def _probe_stability(self) -> bool:
        """Whether an answer stays in place, unchanged, when the conversation goes on."""
        for content in (_MARK, f"<think>\n{_MARK}\n</think>\n\nanswer"):
            text = self.render(_answered(content), add_generation_prompt=False)
            start, kept, _ = text.partition(content)
            for following in ([_QUESTION], [*_answered("answer"), _QUESTION]):
                longer = self.render([*_answered(content), *following])
                if not kept or not longer.startswith(start + content):
                    return False
        return True

    def _stop_tokens(self, stop: Sequence[str]) -> tuple[int, ...]:
        found: list[int] = []
        if self._end_of_turn and self._end_of_turn[0] in self._special:
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
    there, a new sample begins with the whole conversation.
    """

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._messages: list[Message] = []
        self._text = ""

    def copy(self) -> Conversation:
        """Another one that stands where this one does."""
        other = Conversation(self._chat)
        other._messages, other._text = list(self._messages), self._text
        return other

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """The first prompt."""
        if not self._chat.prefix_stable:
            self._messages = list(messages)
            self._text = self._chat.render(messages)
        return self._chat.first_prompt(messages)

    def follow(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[list[int], bool]:
        """Tokens after an answer, and whether they begin a new sample (then they are a whole
        prompt) or extend the tokens before them."""
        chat = self._chat
        if chat.prefix_stable:
            return chat.next_prompt(sampled, messages), False
        answer = chat.raw_text_of(sampled)
        standing = self._text + answer
        self._messages += [{"role": "assistant", "content": answer}, *messages]
        self._text = chat.render(self._messages)
        if not self._text.startswith(standing):
            return chat.encode(self._text) + chat.prefix_tokens, True
        tokens = chat.encode(self._text[len(standing) :]) + chat.prefix_tokens
        if sampled and tokens and sampled[-1] == tokens[0] and tokens[0] in chat.stop_token_ids:
            tokens = tokens[1:]
        return tokens, False


def _answered(content: str) -> list[Message]:
    return [_QUESTION, {"role": "assistant", "content": content}]


def _key(messages: Sequence[Message]) -> _Key:
    return tuple((message["role"], message["content"]) for message in messages)


class _SizedCache(Generic[K, V]):
    """A dictionary of sized values that starts anew when they are too many together."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._size = 0

    def of(self, key: K, make: Callable[[], V]) -> V:
        if key not in self._values:
            value = make()
            self._size += len(value) + _ENTRY_SIZE
            if self._size > _CACHE_SIZE:
                self._values.clear()
                self._size = len(value) + _ENTRY_SIZE
            self._values[key] = value
        return self._values[key]
