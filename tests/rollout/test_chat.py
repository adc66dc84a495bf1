from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.environments.base import Message
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.conversation import Conversation
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.system.errors import ConfigError
from tests.rollout import chat_models as make

STABLE = {
    "chatml": (make.CHATML, "<|im_end|>"),
    "default_system": (make.CHATML_DEFAULT_SYSTEM, "<|im_end|>"),
    "llama3": (make.LLAMA3, "<|eot_id|>"),
    "mistral": (make.MISTRAL, "<|endoftext|>"),
    "plain": (None, "<|endoftext|>"),
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def chat_of(name: str, **options: object) -> ChatTokenizer:
    return ChatTokenizer(make.char_tokenizer(STABLE[name][0]), **options)  # type: ignore[arg-type]


def token(text: str) -> int:
    return int(make.char_tokenizer().convert_tokens_to_ids(text))


@pytest.mark.parametrize("end_sampled", [True, False])
@pytest.mark.parametrize("name", STABLE)
def test_turns_equal_rendering_the_whole_conversation(name: str, end_sampled: bool) -> None:
    chat = chat_of(name)
    assert chat.prefix_stable()
    messages = [user("free: 1 2 3")]
    tokens = chat.first_prompt(messages)
    for answer, observation in (("2", "free: 1 3"), ("[3", "free: 1"), ("one", "again")):
        sampled = chat.encode(answer)
        if end_sampled:
            sampled.append(token(STABLE[name][1]))
        tokens += sampled + chat.next_prompt(sampled, [user(observation)])
        messages += [assistant(answer), user(observation)]
        # Mistral's template puts a space before an answer that its prompt does not end with.
        if name != "mistral":
            assert tokens == chat.encode(chat.render(messages))


@pytest.mark.parametrize("name", STABLE)
def test_only_what_follows_the_answer_is_added(name: str) -> None:
    chat = chat_of(name)
    following = chat.next_prompt([], [user("next")])
    text = make.char_tokenizer().decode(following)
    assert "next" in text
    assert "question" not in text
    assert "You help" not in text
    assert following.count(token(STABLE[name][1])) >= 1


def test_system_and_several_messages() -> None:
    chat = chat_of("default_system")
    messages: list[Message] = [{"role": "system", "content": "rules"}, user("a")]
    sampled = [*chat.encode("b"), token("<|im_end|>")]
    tokens = chat.first_prompt(messages) + sampled
    tokens += chat.next_prompt(sampled, [{"role": "tool", "content": "7"}, user("c")])
    whole = [*messages, assistant("b"), {"role": "tool", "content": "7"}, user("c")]
    assert tokens == chat.encode(chat.render(whole))


def test_prefix_is_given_after_every_header_and_part_of_the_text() -> None:
    chat = chat_of("chatml", answer_prefix="[")
    first = chat.first_prompt([user("a")])
    assert first == chat.encode(chat.render([user("a")]) + "[")
    sampled = chat.encode("5")
    assert chat.next_prompt(sampled, [user("b")])[-1] == token("[")
    assert chat.text_of(sampled) == "[5"
    assert chat.text_of([*sampled, token("<|im_end|>")]) == "[5"


def test_another_stop_than_end_of_turn_stays_and_end_of_turn_follows() -> None:
    chat = chat_of("chatml", stop=("]",))
    assert chat.stop_token_ids == (token("<|im_end|>"), token("<|endoftext|>"), token("]"))
    for stop in ("]", "<|endoftext|>"):
        sampled = [*chat.encode("5"), token(stop)]
        assert chat.next_prompt(sampled, [user("b")])[0] == token("<|im_end|>")


def test_results_are_not_shared_with_the_cache() -> None:
    chat = chat_of("chatml")
    first = chat.first_prompt([user("a")])
    following = chat.next_prompt([], [user("a")])
    expected = list(first), list(following)
    first.append(1)
    following.append(1)
    assert (chat.first_prompt([user("a")]), chat.next_prompt([], [user("a")])) == expected


def test_templates_that_cannot_work_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="0 times instead of once"):
        ChatTokenizer(make.char_tokenizer(make.DROPS_ANSWERS))
    chat = chat_of("mistral")
    with pytest.raises(ConfigError, match=r"roles system, user: .*only user and assistant"):
        chat.first_prompt([{"role": "system", "content": "x"}, user("y")])


def test_a_template_that_drops_reasoning_begins_new_samples_only_where_it_must() -> None:
    chat = ChatTokenizer(make.char_tokenizer(make.DROPS_REASONING))
    assert not chat.prefix_stable()
    conversation = Conversation(chat)
    tokens = conversation.begin([user("a")])
    plain = [*chat.encode("b"), token("<|im_end|>")]
    following, new_sample = conversation.follow(plain, [user("c")])
    assert not new_sample
    tokens += plain + following
    assert tokens == chat.encode(chat.render([user("a"), assistant("b"), user("c")]))
    thought = [*chat.encode("<think>hm</think>\n\nd"), token("<|im_end|>")]
    following, new_sample = conversation.follow(thought, [user("e")])
    assert new_sample
    whole = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    assert following == chat.encode(chat.render(whole))


@settings(max_examples=50, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.text(st.sampled_from("abc <>|\n[5]"), min_size=0, max_size=8),
            st.text(st.sampled_from("xyz \n|0"), max_size=8),
            st.booleans(),
        ),
        max_size=4,
    ),
    name=st.sampled_from(["chatml", "plain"]),
)
def test_any_conversation_equals_its_rendering(
    turns: list[tuple[str, str, bool]], name: str
) -> None:
    chat = CHATS[name]
    messages = [user("start")]
    tokens = chat.first_prompt(messages)
    for answer, observation, end_sampled in turns:
        sampled = chat.encode(answer) + [token(STABLE[name][1])] * end_sampled
        tokens += sampled + chat.next_prompt(sampled, [user(observation)])
        messages += [assistant(answer), user(observation)]
    assert tokens == chat.encode(chat.render(messages))


CHATS = {name: chat_of(name) for name in ("chatml", "plain")}


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*make.SPECIAL, "<|", "im_end|>", "earlanswermark", "\ue000", "\ue0001\ue001"]
        )
    )
)
def test_special_tokens_that_a_message_quotes_are_text(name: str, parts: list[str]) -> None:
    """Else a page from the net could end the turn and speak as the system."""
    chat, content = chat_of(name), "b" + "".join(parts) + "b"
    specials = {token(text) for text in make.SPECIAL}

    def own(tokens: list[int]) -> list[int]:
        return [each for each in tokens if each in specials]

    assert own(chat.first_prompt([user(content)])) == own(chat.first_prompt([user("b")]))
    tokens = chat.next_prompt([], [user(content)])
    assert own(tokens) == own(chat.next_prompt([], [user("b")]))
    printable = "".join(each if each.isascii() else "<unk>" for each in content)
    assert printable in make.char_tokenizer().decode(tokens)


def test_quoted_special_tokens_among_the_tokens_around_them() -> None:
    """Only the quoted text has other tokens than before."""
    chat = chat_of("chatml")
    quoted, plain = (chat.first_prompt([user(f"ab{each}cd")]) for each in ("<|im_end|>", "-"))
    start = plain.index(token("-"))
    assert quoted[:start] == plain[:start]
    assert quoted[start : start + 10] == [token(each) for each in "<|im_end|>"]
    assert quoted[start + 10 :] == plain[start + 1 :]
    # What the policy itself has written stays what it was, what somebody else wrote does not.
    for content, own in ((chat.own("b<|eot_id|>c"), True), ("b<|eot_id|>c", False)):
        said = chat.encode(chat.render([user("a"), assistant(content), user("d")]))
        assert (token("<|eot_id|>") in said) == own


@pytest.mark.parametrize("number", ["99", "9" * 5000])
def test_an_answer_that_holds_the_marks_of_quoted_texts_is_text(number: str) -> None:
    chat = chat_of("chatml")
    text = chat.render([user("a"), assistant(f"\ue000{number}\ue001"), user("b")])
    said = make.char_tokenizer().decode(chat.encode(text))
    assert f"<unk>{number}<unk>" in said


@pytest.mark.parametrize("template", [make.CHATML, "{{ tools | tojson }}" + make.CHATML])
def test_special_tokens_that_a_tool_quotes_are_text(template: str) -> None:
    chat = ChatTokenizer(make.char_tokenizer(template))

    def prompt(description: str) -> list[int]:
        function = {"name": "add", "description": description, "parameters": {}}
        return chat.first_prompt([user("a")], Tools([{"type": "function", "function": function}]))

    quoted = prompt("<|im_end|>")
    assert quoted.count(token("<|im_end|>")) == prompt("-").count(token("<|im_end|>"))
    assert "<|im_end|>" in "".join(make.char_tokenizer().convert_ids_to_tokens(quoted))
