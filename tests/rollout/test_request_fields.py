"""Every field of every API, sent: done, refused by its name, or without any effect."""

from __future__ import annotations

from typing import Any

import pytest

from earl_core.rollout.gateway.fields import APIS
from tests.rollout import asking as asking_module
from tests.rollout.asking import Asking, answering, asked
from tests.rollout.test_requests import HI, MESSAGES_TOOL, RESPONSES_TOOL, THINKING, TOOL

JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
ASSISTANT = [*HI, {"role": "assistant", "content": "I say"}]
DONE: dict[str, dict[str, Any]] = {
    "chat completions": {
        "messages": HI,
        "model": "policy",
        "n": 2,
        "stop_token_ids": [9],
        "stop": ["Observation:", "Calling tools:"],
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": {"messages": ASSISTANT, "continue_final_message": True},
        "add_generation_prompt": True,
        "reasoning_effort": "none",
        "max_completion_tokens": 5,
        "max_tokens": 5,
        "tools": [TOOL],
        "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
        "response_format": JSON_SCHEMA,
        "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
        "structured_outputs": {"choice": ["yes", "no"]},
        "guided_json": {"type": "object"},
        "guided_choice": ["yes", "no"],
        "guided_regex": "[ab]+",
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": {"logprobs": True, "top_logprobs": 3},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    },
    "Responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "instructions": "Be brief.",
        "model": "policy",
        "previous_response_id": None,
        "max_output_tokens": 5,
        "tools": [RESPONSES_TOOL],
        "tool_choice": {
            "tools": [RESPONSES_TOOL],
            "tool_choice": {"type": "function", "name": "f"},
        },
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        "reasoning": {"effort": "none"},
        "stream": True,
    },
    "Messages": {
        "messages": HI,
        "system": [{"type": "text", "text": "Be brief."}],
        "model": "policy",
        "max_tokens": 5,
        "tools": [MESSAGES_TOOL],
        "tool_choice": {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}},
        "thinking": {"type": "disabled"},
        "stop_sequences": ["Observation:"],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stream": True,
    },
    "generate": {"token_ids": [5], "sampling_params": {}, "model": "policy"},
    "sampling_params of generate": {
        "stop": "a",
        "stop_token_ids": [9],
        "max_tokens": 5,
        "logprobs": 0,
    },
}
"""A value of each field that is done; several fields where it does not stand alone."""
LEAST: dict[str, dict[str, Any]] = {
    "chat completions": {"messages": HI},
    "Responses": {"input": "hello"},
    "Messages": {"messages": HI, "max_tokens": 9},
    "generate": {"token_ids": [5]},
    "sampling_params of generate": {},
}


@pytest.mark.parametrize("api", APIS)
def test_every_field_is_done_or_refused_or_changes_nothing(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking_module, "CHATML", THINKING)
    path, fields = APIS[api]
    engine = answering()

    async def sent(asking: Asking, given: dict[str, Any]) -> Any:
        body = {**LEAST[api], **given}
        if not path:
            body = {"token_ids": [5], "sampling_params": body}
        url = asking.url.removesuffix("/v1") + (path or APIS["generate"][0]).removeprefix("POST ")
        reply = await asking.http.post(url, json=body)
        request = engine.batches[-1][-1] if engine.batches else None
        return reply, request and (request.tokens, request.stop_token_ids, request.max_tokens)

    async def scenario(asking: Asking) -> None:
        assert {name for name, field in fields.items() if field.verdict == "done"} == DONE[
            api
        ].keys()
        _, plain = await sent(asking, {})
        for name, field in fields.items():
            assert field.why
            value = DONE[api].get(name, "x")
            several = isinstance(value, dict) and name in value
            reply, request = await sent(asking, value if several else {name: value})
            if field.verdict == "refused":
                assert reply.status_code == 400, (name, reply.text)
                assert f"{name} is not supported" in reply.json()["error"]["message"]
                for nothing in field.nothing:
                    assert (await sent(asking, {name: nothing}))[0].status_code == 200, name
            else:
                assert reply.status_code == 200, (name, reply.text)
            if field.verdict == "harmless":
                assert request == plain, name
        reply, _ = await sent(asking, {"colour": "red"})
        assert "colour is unknown here" in reply.json()["error"]["message"]

    asked(scenario, engine, max_turns=1000, max_tokens_per_turn=20)


ODD: list[Any] = [
    [None], {"type": None}, {"type": "allowed_tools", "allowed_tools": []}, "json_schema",
    {"format": "json_schema"}, {"regex": "a{9999999999}"}, "a{9999999999}",
    {"pattern": "a{9999999999}"},
]  # fmt: skip


@pytest.mark.parametrize("api", [api for api, (path, _) in APIS.items() if path])
def test_a_value_of_a_wrong_form_costs_its_request_only(api: str) -> None:
    path, fields = APIS[api]

    async def scenario(asking: Asking) -> None:
        url = asking.url.removesuffix("/v1") + path.removeprefix("POST ")
        tools = {"tools": DONE[api]["tools"]} if "tools" in fields else {}
        for name in (name for name, field in fields.items() if field.verdict == "done"):
            for value in ODD:
                body = {**LEAST[api], **tools, name: value}
                reply = await asking.http.post(url, json=body)
                assert reply.status_code in (200, 400), (name, value, reply.text)
        assert (await asking.http.post(url, json=LEAST[api])).status_code == 200

    asked(scenario, answering(), max_turns=4000, max_tokens_per_turn=20)
