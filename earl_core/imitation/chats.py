"""A chat as an episode: the tokens that a rollout would have, had the model said the answers.

Trained are the answers' tokens and the token that ends each, as the model has to sample them. Where
the template changes earlier turns a new sample begins, as in a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.environments.adapters.chat_messages import drop_absent
from earl_core.environments.adapters.data_set import DataSet
from earl_core.environments.adapters.row_forms import RowForm
from earl_core.environments.base import Message
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.conversation import Conversation
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, anchor_of

NO_VERSION = -1
"""The policy version of tokens that no policy of the run has sampled."""


class Chats:
    """Demonstrations of a data set. form: how its rows are read. tools: of the run's environments,
    by their labels, for chats that bring none; a mixture's chats name theirs in `environment`."""

    def __init__(
        self,
        rows: DataSet,
        chat: ChatTokenizer,
        form: RowForm,
        tools: Mapping[str, Tools],
    ) -> None:
        self._rows, self._chat, self._form, self._tools = rows, chat, form, tools

    def __len__(self) -> int:
        return len(self._rows)

    def episode(self, index: int) -> Episode:
        """One chat. Raises `ConfigError` for one that cannot be imitated."""
        row = self._rows[index]
        try:
            messages = self._form.chat(row)
            given = self._form.tools(row)
            tools = self._own(row) if given is None else Tools(given)
            drop_absent(messages, tools.schemas)
            samples = samples_of(self._chat, messages, tools)
        except ConfigError as error:
            raise ConfigError(f"{self._rows.place(index)} {error}") from error
        return Episode(index, index, index, samples, finish_reason="demonstration")

    def place(self, index: int) -> str:
        """Name the place where people find a chat."""
        return self._rows.place(index)

    def _own(self, row: Mapping[str, Any]) -> Tools:
        label = row.get("environment") or ""
        if label and label not in self._tools:
            raise ConfigError(f"names the environment {label!r}, which the run does not have")
        return self._tools.get(label, NO_TOOLS)


def samples_of(
    chat: ChatTokenizer, messages: Sequence[Message], tools: Tools = NO_TOOLS
) -> list[Sample]:
    """The samples of a chat. Raises `ConfigError`, which goes on after the chat's place."""
    said: list[Message] = [
        {**each, "content": chat.own(each["content"])} if each["role"] == "assistant" else each
        for each in messages
    ]
    answers = [at for at, each in enumerate(said) if each["role"] == "assistant"]
    samples = [Sample()]
    try:
        conversation = Conversation(chat, tools)
        given = conversation.begin(said[: answers[0]])
        for number, (at, after) in enumerate(zip(answers, [*answers[1:], len(said)], strict=True)):
            tokens = _answer(chat, said, at, tools)
            heard = said[answers[number - 1] + 1 if number else 0 : at]
            text = "\n".join(each["content"] for each in heard)
            samples[-1].begin_turn(given, text, anchor_of(heard))
            span = VersionSpan(NO_VERSION, 0, len(tokens))
            calls = "tool_calls" in said[at]
            shown = chat.raw_text_of(tokens) if calls else chat.text_of(tokens)
            samples[-1].answer(tokens, [0.0] * len(tokens), [span], shown, number)
            left = said[at + 1 : after]
            if number + 1 == len(answers):
                samples[-1].texts.append("\n".join(each["content"] for each in left))
                return samples
            given, begins = conversation.follow(tokens, left)
            if begins:
                samples.append(Sample())
    except ConfigError as error:
        raise ConfigError(f"cannot be imitated, {error.problem}", remedy=error.remedy) from error
    raise AssertionError("a chat ends with its last answer")


def _answer(chat: ChatTokenizer, messages: Sequence[Message], at: int, tools: Tools) -> list[int]:
    """The tokens of an answer as the model has to sample them, the one that ends it included."""
    tokens = chat.encode(_text(chat, messages, at, tools))
    ends = [place for place, token in enumerate(tokens, start=1) if token in chat.stop_token_ids]
    if chat.ends is not None and (stopped := chat.ends(tokens, 0)) is not None:
        ends.append(stopped)
    answer = tokens[: min(ends)] if ends else [*tokens, *chat.stop_token_ids[:1]]
    if ends and chat.text_of(tokens).strip() != chat.text_of(answer).strip():
        raise ConfigError(
            f"messages[{at}] says more after {chat.raw_text_of(answer)[-20:]!r}, with which an "
            "answer ends"
        )
    # Some models name the token that ends texts as the unknown one, too.
    if chat.unknown_token in set(answer).difference(chat.stop_token_ids):
        raise ConfigError(f"messages[{at}] has characters that the model's tokenizer does not know")
    return answer


def _text(chat: ChatTokenizer, messages: Sequence[Message], at: int, tools: Tools) -> str:
    """The text of an answer after what every answer is begun with."""
    before = chat.render(messages[:at], tools)
    whole = chat.render(messages[: at + 1], tools, add_generation_prompt=False)
    content = messages[at]["content"]
    common = _common(before, whole)
    begun, text = before[common:] + chat.answer_prefix, whole[common:]
    if common < len(before) or content.strip() not in text:
        # The template drops the reasoning of answers that are given to it.
        if "tool_calls" in messages[at]:
            raise ConfigError(
                f"messages[{at}] has calls, and the chat template changes what it says besides",
                remedy="leave that out, or set model.chat_template to a Jinja file that keeps it",
            )
        text = content
    if not text.startswith(begun):
        raise ConfigError(
            f"messages[{at}] does not begin with {begun!r}, as every answer of the model does",
            remedy="begin it so, or change rollout.answer_prefix or model.chat_template",
        )
    return text.removeprefix(begun)


def _common(one: str, other: str) -> int:
    """Count the characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
