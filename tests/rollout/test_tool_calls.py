"""Calls of tools in the form of each family: render, parse and render again is the identity."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.environments.base import FunctionCall, Message, ToolCall, call_id
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.conversation import Conversation
from earl_core.rollout.chat.tool_calls import FORMATS, Tools, parser_of
from earl_core.system.errors import ConfigError
from tests.rollout.chat_models import CHATML, DROPS_REASONING, char_tokenizer
from tests.rollout.tool_templates import FAMILIES, Family

USER: Message = {"role": "user", "content": "What is it?"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "exact": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
    },
}


def schema(name: str, parameters: dict[str, Any] = PARAMETERS) -> dict[str, Any]:
    about = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": about}


TOOLS = Tools([schema("search"), schema("add_up")])
CALLS: list[FunctionCall] = [
    {"name": "search", "arguments": {"text": 'two words, "quoted" <b>', "list": [1, "a"]}},
    {"name": "add_up", "arguments": {"number": 7, "exact": -1.5, "flag": True, "text": "12"}},
]


def chat_of(family: Family, **options: Any) -> ChatTokenizer:
    return ChatTokenizer(char_tokenizer(family.template, family.special), **options)


def calling(calls: list[FunctionCall], content: str = "") -> Message:
    numbered = [
        ToolCall(id=call_id(number), type="function", function=call)
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": numbered}


def results(calls: list[FunctionCall]) -> list[Message]:
    return [
        {"role": "tool", "content": f"result {n}", "tool_call_id": call_id(n), "name": call["name"]}
        for n, call in enumerate(calls)
    ]


def answer_tokens(chat: ChatTokenizer, before: list[Message], said: Message) -> list[int]:
    """What a model samples that answers just this, its end of turn included."""
    prompt, whole = chat.render(before, TOOLS), chat.render([*before, said], TOOLS, False)
    assert whole.startswith(prompt)
    tokens = chat.encode(whole[len(prompt) :])
    ends = [at for at, token in enumerate(tokens) if token in chat.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_render_parse_render_is_the_identity(name: str) -> None:
    family = FAMILIES[name]
    chat = chat_of(family)
    system: list[Message] = [{"role": "system", "content": "Be brief."}, USER]
    for before in ([USER], system):
        if before is system and any(part in name for part in ("Gemma", "istral")):
            continue
        for calls in (CALLS[:1], CALLS[1:], CALLS):
            if len(calls) > 1 and not family.parallel:
                continue
            said = calling(calls)
            tokens = answer_tokens(chat, before, said)
            answer = chat.read(tokens, TOOLS)
            assert (answer.calls, answer.error) == (calls, "")
            assert answer.text.strip() == ""
            again = answer.message([call_id(number) for number in range(len(answer.calls))])
            assert again["tool_calls"] == said["tool_calls"]
            assert chat.render([*before, {**again, "content": ""}], TOOLS) == chat.render(
                [*before, said], TOOLS
            )
            whole = [*before, said, *results(calls)]
            conversation = Conversation(chat, TOOLS)
            first = conversation.begin(before)
            following, new_sample = conversation.follow(tokens, results(calls))
            assert not new_sample
            assert first + tokens + following == chat.encode(chat.render(whole, TOOLS))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_by_the_template(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = char_tokenizer(family.template, family.special)
    found = parser_of(tokenizer, family.template, "auto")
    assert vars(found) == vars(parser_of(tokenizer, family.template, family.format))


@given(
    st.sampled_from(["hermes", "llama3", "mistral", "json", "phi4", "deepseek", "mistral_named"]),
    st.dictionaries(
        st.text("abcdefgh_", min_size=1),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text("ab \"{}[]'\\<>,:"),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner),
            max_leaves=5,
        ),
        max_size=4,
    ),
)
@settings(max_examples=70, deadline=None)
def test_any_arguments_survive(form: str, arguments: dict[str, Any]) -> None:
    import json

    written = json.dumps(arguments)
    named = json.dumps({"name": "f", "arguments": arguments})
    text = {
        "hermes": f"I see.\n<tool_call>\n{named}\n</tool_call>",
        "llama3": json.dumps({"name": "f", "parameters": arguments}),
        "mistral": f"[TOOL_CALLS] [{named}]",
        "json": f"```json\n{named}\n```",
        "phi4": f"<|tool_call|>[{named}]<|/tool_call|>",
        "deepseek": f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{written}<｜tool▁call▁end｜>",
        "mistral_named": f"[TOOL_CALLS]f[ARGS]{written}",
    }[form]
    parser = parser_of(char_tokenizer(CHATML), "", form)
    _, calls = parser.parse(text, Tools([schema("f", {"type": "object"})]))
    assert calls == [{"name": "f", "arguments": arguments}]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ('<tool_call>{"name": "search", "arguments": {"text"</tool_call>', "JSON"),
        ("<tool_call>search</tool_call>", "JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "must say the name"),
        ('<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("<tool_call>", "JSON"),
        ("<tool_call>" + "[" * 5000, ""),
    ],
)
def test_calls_that_cannot_be_read_are_errors(said: str, error: str) -> None:
    chat = ChatTokenizer(char_tokenizer(FAMILIES["Qwen, Hermes, SmolLM3, EXAONE"].template))
    answer = chat.read(chat.encode(said), TOOLS)
    assert not answer.calls
    assert answer.error
    assert error in answer.error


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("no call", 0),
        ("<think>maybe <tool_call>{}</tool_call></think>no", 0),
        ("<think>maybe <tool_call>{}</tool_call>", 0),
        ('maybe</think><tool_call>{"name": "search", "arguments": {}}</tool_call>', 1),
        ('<tool_call>{"name": "search"}', 1),
    ],
)
def test_what_is_a_call_and_what_is_none(said: str, calls: int) -> None:
    chat = ChatTokenizer(char_tokenizer(CHATML))
    answer = chat.read(chat.encode(said), TOOLS)
    assert (len(answer.calls), answer.error) == (calls, "")
    without = chat.read(chat.encode(said))
    assert (without.calls, without.text) == ((), said)


def test_a_tokenizers_own_response_template_is_used() -> None:
    tokenizer = char_tokenizer(CHATML)
    own = {"open": "CALL ", "close": ";", "repeats": True, "content": "json"}
    transform = {"transform": {"type": "function", "function": "{content}"}}
    fields = {"tool_calls": own | transform, "content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "assistant\n", "fields": fields}
    chat = ChatTokenizer(tokenizer)
    said = 'yes CALL {"name": "search", "arguments": {}};'
    assert chat.read(chat.encode(said), TOOLS).calls == [{"name": "search", "arguments": {}}]
    tokenizer.response_template = {"start_anchor": "x", "fields": {"a": {"contents": "json"}}}
    with pytest.raises(ConfigError, match=r"set rollout\.tool_format to one of hermes, "):
        ChatTokenizer(tokenizer).read([], TOOLS)
    named = ChatTokenizer(tokenizer, tool_format="json")
    assert named.read(named.encode('{"name": "f"}'), TOOLS).calls[0]["name"] == "f"


def test_a_template_that_drops_reasoning_keeps_it_over_results_and_drops_it_over_users() -> None:
    chat = chat_of(FAMILIES["Qwen3, which drops reasoning"])
    conversation = Conversation(chat, TOOLS)
    conversation.begin([USER])
    said = '<think>hm</think>\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    tokens = [*chat.encode(said), chat.stop_token_ids[0]]
    _, new_sample = conversation.follow(tokens, results(CALLS[:1]))
    assert not new_sample
    whole, new_sample = conversation.follow([*chat.encode("done"), chat.stop_token_ids[0]], [USER])
    assert new_sample
    assert "hm" not in chat.raw_text_of(whole)


def test_formats_of_the_configuration_are_those_that_exist() -> None:
    from typing import get_args

    from earl_core.config.rollout import ToolFormatName

    assert set(get_args(ToolFormatName)) == {"auto", *FORMATS}


def test_results_are_told_in_words_where_the_template_knows_none() -> None:
    chat = ChatTokenizer(char_tokenizer(DROPS_REASONING))
    text = chat.render([USER, calling(CALLS, "I look."), *results(CALLS)], TOOLS)
    assert text.count("<tools>\n{") == 1
    assert text.count('"name": "search"') == 2
    assert "I look.\n<tool_call>" in text
    assert text.count("<|im_start|>user") == 2
    assert "result 0\n</tool_response>\n<tool_response>\nresult 1" in text
