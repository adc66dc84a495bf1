"""The tokens of whole conversations against `apply_chat_template`, for published templates."""

from __future__ import annotations

from typing import Any

import pytest

from earl_core.environments.base import Message
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.conversation import Conversation
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from tests.conformance.templates import PUBLISHED, tokenizer_of

ANSWERS = ("Yes.", "a b\nc", "{1}")
REASONED = tuple(f"<think>\nhm\n</think>\n\n{answer}" for answer in ANSWERS)
TOOLS = Tools(
    [
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Searches.",
                "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
            },
        }
    ]
)


def chat_of(name: str) -> ChatTokenizer:
    tokenizer = tokenizer_of(name)
    ends = [tokenizer.convert_tokens_to_ids(each) for each in PUBLISHED[name].ends]
    return ChatTokenizer(tokenizer, tool_format="hermes", eos_token_ids=ends)


CHATS = {name: chat_of(name) for name in PUBLISHED}


def rendered(name: str, messages: list[Message], tools: Tools) -> list[int]:
    tokens: Any = tokenizer_of(name).apply_chat_template(
        [dict(message) for message in messages],
        tools=list(tools.schemas) or None,
        add_generation_prompt=True,
        return_dict=False,
    )
    return list(tokens)


def own_end(name: str) -> str:
    """The token that closes an answer in the template, or the next role where none does."""
    chat, tokenizer = CHATS[name], tokenizer_of(name)
    return str(tokenizer.convert_ids_to_tokens(chat.stop_token_ids[0]))


def played(
    name: str, answers: tuple[str, ...], end: str, tools: Tools = NO_TOOLS
) -> tuple[list[int], list[int], int]:
    """The tokens of a conversation, the template's of the same, and how many samples it has."""
    chat, tokenizer = CHATS[name], tokenizer_of(name)
    conversation = Conversation(chat, tools)
    messages: list[Message] = [{"role": "user", "content": "first"}]
    tokens, samples = conversation.begin(messages), 1
    for number, answer in enumerate(answers):
        sampled: list[int] = tokenizer.encode(answer + end, add_special_tokens=False)
        observed: Message = {"role": "user", "content": f"next {number}"}
        following, begins = conversation.follow(sampled, [observed])
        samples += begins
        tokens = following if begins else tokens + sampled + following
        messages += [{"role": "assistant", "content": answer}, observed]
    return tokens, rendered(name, messages, tools), samples


def compared(name: str, tokens: list[int]) -> object:
    """Without what is named in docs/concepts/samples.md."""
    tokenizer, differs = tokenizer_of(name), PUBLISHED[name].differs
    text = str(tokenizer.decode(tokens))
    if differs == "white space":
        return "".join(text.split())
    if differs == "another end":
        return text.replace("<|return|>", "").replace("<|channel|>final<|message|>", "")
    return tokens


@pytest.mark.parametrize("answers", [ANSWERS, REASONED], ids=["plain", "reasoned"])
@pytest.mark.parametrize("cut", [False, True], ids=["ended", "cut"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_has_the_templates_tokens(
    name: str, cut: bool, answers: tuple[str, ...]
) -> None:
    """cut: answers that ended at their budget, before any end was sampled."""
    tokens, whole, _ = played(name, answers, "" if cut else own_end(name))
    assert compared(name, tokens) == compared(name, whole)
    assert len(whole) > 40


@pytest.mark.parametrize("name", ["Hermes 3", "Command R+", "Qwen 3", "Mistral Nemo", "Llama 3.1"])
def test_with_tools_the_template_for_tools_renders(name: str) -> None:
    tokens, whole, samples = played(name, ANSWERS, own_end(name), TOOLS)
    assert tokens == whole
    assert "search" in tokenizer_of(name).decode(whole)
    without, whole, _ = played(name, ANSWERS, own_end(name))
    assert without == whole
    assert "search" not in tokenizer_of(name).decode(whole)
    # Command R+ repeats its instructions after the last message alone.
    assert (samples > 1) == (name == "Command R+")


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_end_that_is_named_stops_and_is_no_text(name: str) -> None:
    chat, tokenizer = CHATS[name], tokenizer_of(name)
    published = PUBLISHED[name]
    for end in (published.special[0], *published.ends, own_end(name)):
        number = tokenizer.convert_tokens_to_ids(end)
        assert number in chat.stop_token_ids
        sampled = [*tokenizer.encode("Yes", add_special_tokens=False), number]
        assert chat.text_of(sampled) == chat.raw_text_of(sampled) == "Yes"
        text = tokenizer.decode(chat.next_prompt(sampled, [{"role": "user", "content": "next"}]))
        # Never a second time, and nothing of the next message is lost.
        assert not text.lstrip().startswith(end)
        assert "next" in text
