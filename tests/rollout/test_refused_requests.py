"""Requests that cannot be answered: each gets one clear message, and costs nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rollout.asking import HELLO, ROWS, Asking, asked
from tests.rollout.test_tool_calls import schema

BROKEN_CALL = {"name": "f", "arguments": "["}
SURROGATE_CALL = {"name": "f", "arguments": '{"a": "\\ud800"}'}
DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "no JSON"),
    "no object": ([], "JSON object"),
    "no messages": ({"messages": []}, "at least one message"),
    "n": ({**HELLO, "n": 0}, "n must be a whole number from 1 to 128"),
    "n beyond the budget": ({**HELLO, "n": 2}, "the episode has 1 answers left"),
    "a tool": ({**HELLO, "tools": [{"type": "function"}]}, "a tool is described by"),
    "a schema": ({**HELLO, "tools": [schema("f", {"type": 7})]}, "are no JSON schema"),
    "a choice": ({**HELLO, "tool_choice": "some"}, "tool_choice must be auto, none, required"),
    "a choice without tools": ({**HELLO, "tool_choice": "required"}, "tools has none"),
    "a choice of another tool": (
        {
            **HELLO,
            "tools": [schema("f")],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice names 'g'",
    ),
    "a format": ({**HELLO, "response_format": {"type": "yaml"}}, "response_format.type must be"),
    "a format's schema": (
        {
            **HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}},
        },
        "response_format is no JSON schema",
    ),
    "a pattern": ({**HELLO, "guided_regex": "("}, "guided_regex is no regular expression"),
    "a grammar": ({**HELLO, "structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    "a variable": ({**HELLO, "chat_template_kwargs": {"x": 1}}, "reads no such variable"),
    "whose turn it is": ({**HELLO, "add_generation_prompt": False}, "leaves open whose turn"),
    "an opening of the user's": ({**HELLO, "continue_final_message": True}, "the assistant's text"),
    "stop tokens": ({**HELLO, "stop_token_ids": [ROWS]}, f"from 0 to {ROWS - 1}"),
    "no tokens": ({**HELLO, "max_completion_tokens": 0}, "max_completion_tokens must be a whole"),
    "a field of nobody's": ({**HELLO, "colour": "red"}, "colour is unknown here"),
    "a call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": BROKEN_CALL}]}]},
        "the arguments of 'f' are no JSON object",
    ),
    "stop": ({**HELLO, "stop": ["a", ""]}, "stop must have texts that are not empty"),
    "many stops": ({**HELLO, "stop": ["a"] * 65}, "a list of 64 texts at most"),
    "a role": ({"messages": [{"role": "judge", "content": ""}]}, "one of the roles"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "no text",
    ),
    "no text": ({"messages": [{"role": "user", "content": None}]}, "must be a text"),
    "a surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "UTF-8"),
    "a surrogate in a call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": SURROGATE_CALL}]}]},
        "messages[0].tool_calls: the arguments of f.a cannot be encoded as UTF-8",
    ),
    "calls that are no list": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]},
        "messages[0].tool_calls must be a list",
    ),
    "a deep schema": ({**HELLO, "tools": [schema("f", DEEP)]}, "nested too deeply"),
    "a surrogate in a tool": (
        {**HELLO, "tools": [schema("f", {"type": "object", "title": "\ud800"})]},
        "tools[0].function.parameters.title cannot be encoded as UTF-8",
    ),
    "a budget": ({**HELLO, "max_tokens": 0.5}, "whole number above 0"),
    "a flood": (
        {"messages": [{"role": "user", "content": "ten" * 4_000_000}]},
        "bytes, more than the model's context can hold",
    ),
    **{
        f"a surrogate in {name}": ({"messages": [{**message, **HELLO["messages"][0]}]}, where)  # type: ignore[index]
        for name, message, where in (
            ("a name", {"name": "\ud800"}, "messages[0].name cannot be encoded"),
            ("an id", {"tool_call_id": "a\udfff"}, "messages[0].tool_call_id cannot be encoded"),
            ("a key", {"\ud800": 1}, "messages[0] cannot be encoded"),
        )
    },
    **{
        f"a message with {key}": (
            {"messages": [{"role": "assistant", "content": "a", key: value}]},
            told,
        )
        for key, value, told in (
            ("function_call", {"name": "f", "arguments": "{}"}, "the older form of tool_calls"),
            ("audio", {"id": "audio_1"}, "messages[0].audio is not supported"),
            ("refusal", "no", "write it as content"),
            ("prefix", True, "ask for continue_final_message"),
            ("partial", True, "ask for continue_final_message"),
            ("name", 5, "messages[0].name must be a text"),
            ("tool_call_id", 5, "messages[0].tool_call_id must be a text"),
            ("reasoning", 5, "messages[0].reasoning must be a text"),
            ("thinking", "hm", "messages[0].thinking is not supported"),
            ("reasoning_details", [{"text": "hm"}], "write it as reasoning_content"),
            ("reasoning_content", "hm", "the chat template does not read reasoning_content"),
        )
    },
    "reasoning of the user's": (
        {"messages": [{"role": "user", "content": "a", "reasoning": "b"}]},
        "messages[0] has reasoning, and is not the assistant's",
    ),
    "two kinds of reasoning": (
        {
            "messages": [
                {"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}
            ]
        },
        "messages[0] has two kinds of reasoning",
    ),
    "an opening with reasoning": (
        {
            "messages": [
                *HELLO["messages"],
                {"role": "assistant", "content": "a", "reasoning": "b"},
            ],  # type: ignore[misc]
            "continue_final_message": True,
        },
        "cannot go on with a message that has reasoning",
    ),
    **{
        f"{key}, a text": (
            {**HELLO, **({outer: {key: "false"}} if outer else {key: "false"})},
            f"{outer}{'.' if outer else ''}{key} must be true or false, not 'false'",
        )
        for outer, key in (
            *(("", "stream"), ("", "logprobs"), ("", "return_token_ids")),
            *(("", "return_tokens_as_token_ids"), ("", "parallel_tool_calls")),
            *(("", "continue_final_message"), ("", "add_generation_prompt")),
            ("stream_options", "include_usage"),
        )
    },
    "a surrogate in the model": ({**HELLO, "model": "\udc00"}, "model cannot be encoded"),
    "a surrogate in bytes": (b'{"model": "\xed\xa0\x80"}', "no JSON"),
    "a flood in a name": (
        {"messages": [{**HELLO["messages"][0], "name": "ten" * 60_000}]},  # type: ignore[index]
        "characters, more than the model's context can hold",
    ),
    "a flood of messages": (
        {"messages": [{"role": "user", "content": ""}] * 40_000},
        "characters, more than the model's context can hold",
    ),
    "a flood of tools": (
        {**HELLO, "tools": [schema("f", {"type": "object", "title": "ten" * 4_000_000})]},
        "more than the model's context can hold",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_get_one_clear_message_and_cost_nothing(case: str) -> None:
    body, message = REFUSED[case]

    async def scenario(asking: Asking) -> None:
        refused = await asking.post(body)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
        assert (await asking.post(HELLO)).status_code == 200

    asked(scenario, max_turns=1)
