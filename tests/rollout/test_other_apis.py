"""OpenAI's Responses and Anthropic's Messages, by their official clients, onto one session."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic, AuthenticationError, BadRequestError
from openai import AsyncOpenAI

from tests.rollout import asking as asking_module
from tests.rollout.asking import Asking, asked
from tests.rollout.test_requests import HI, MESSAGES_TOOL, RESPONSES_TOOL, saying
from tests.rollout.tool_templates import QWEN

CALL = 'I look.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>.'


@pytest.fixture(autouse=True)
def with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "CHATML", QWEN)


def openai_client(asking: Asking) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=asking.url, api_key=asking.session.key, max_retries=0)


def anthropic_client(asking: Asking) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=asking.url, api_key=asking.session.key, max_retries=0)


def turns(asking: Asking) -> list[int]:
    return [len(sample.turn_starts) for sample in asking.session.end(1.0, {}).samples]


def test_responses_go_on_by_their_items_and_by_their_ids() -> None:
    async def scenario(asking: Asking) -> None:
        api = openai_client(asking)
        tools: Any = [RESPONSES_TOOL]
        first = await api.responses.create(
            model="policy", input="hello", instructions="Be brief.", tools=tools
        )
        message, call = first.output
        assert (message.type, first.output_text) == ("message", "I look.")
        assert (call.type, call.arguments) == ("function_call", '{"a": 1}')
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        items: Any = [*HI, *(each.model_dump() for each in first.output), result]
        second = await api.responses.create(
            model="policy", input=items, instructions="Be brief.", tools=tools
        )
        assert (second.output_text, second.status) == ("five", "completed")
        assert second.usage is not None
        assert second.usage.output_tokens == 5
        # By its id: the first answer is gone on with as a branch, the second extended.
        for before, said in ((second, "yes"), (first, "no")):
            given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "so?"}]}]
            more = await api.responses.create(
                model="policy",
                input=[result, *given] if before is first else given,
                previous_response_id=before.id,
                instructions="Be brief.",
                tools=tools,
            )
            assert more.output_text == said
        with pytest.raises(openai.BadRequestError, match="is no answer of this session"):
            await api.responses.create(model="policy", input="x", previous_response_id="resp_x")
        with pytest.raises(openai.BadRequestError, match="only functions of the caller"):
            await api.responses.create(model="policy", input="x", tools=[{"type": "web_search"}])  # type: ignore[list-item]
        thought: Any = {"id": "r", "type": "reasoning", "summary": []}
        reasoning: Any = [{"type": "reasoning_text", "text": "hm"}]
        for given, told in (
            ([{**thought, "summary": [{"type": "summary_text", "text": "hm"}]}], "reasoning_text"),
            ([{**thought, "content": reasoning}], "ends with reasoning"),
            ([{**thought, "content": reasoning}, *HI], "stands after reasoning"),
            (
                [*HI, {**thought, "content": reasoning}, items[-2]],
                "does not read reasoning_content",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=told):
                await api.responses.create(model="policy", input=given)
        assert turns(asking) == [3, 1]

    asked(scenario, saying(CALL, "five.", "yes.", "no."))


@pytest.mark.parametrize("grows", [True, False])
def test_responses_are_streamed(grows: bool) -> None:
    async def scenario(asking: Asking) -> None:
        api = openai_client(asking)
        pieces, kinds = "", []
        events = await api.responses.create(
            model="policy", input="hello", stream=True, max_output_tokens=3
        )
        async for event in events:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                pieces += event.delta
            if event.type == "response.completed":
                assert event.response.output_text == pieces == "Hi!"
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-1] == "response.completed"
        async with api.responses.stream(
            model="policy", input="again", tools=[RESPONSES_TOOL]
        ) as stream:  # type: ignore[list-item]
            seen = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert "response.function_call_arguments.done" in seen
        assert [item.type for item in final.output] == ["message", "function_call"]

    asked(scenario, saying("Hi!.", CALL, lockstep=not grows))


def test_messages_of_anthropics_client_extend_the_sample() -> None:
    async def scenario(asking: Asking) -> None:
        api = anthropic_client(asking)
        system: Any = [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        ]
        about: Any = {
            "model": "policy",
            "max_tokens": 99,
            "tools": [MESSAGES_TOOL],
            "system": system,
        }
        first = await api.messages.create(messages=HI, **about)
        text, use = first.content
        assert (text.type, use.type, first.stop_reason) == ("text", "tool_use", "tool_use")
        assert use.type == "tool_use"
        assert use.input == {"a": 1}
        result = {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": [{"type": "text", "text": "5"}],
        }
        more: Any = [
            *HI,
            {"role": "assistant", "content": [each.model_dump() for each in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        second = await api.messages.create(messages=more, **about)
        assert (second.content[0].text, second.stop_reason) == ("five", "end_turn")  # type: ignore[union-attr]
        assert second.usage.output_tokens == 5
        # A last message of the assistant's is gone on with.
        opened: Any = [*more, {"role": "assistant", "content": "fi"}]
        third = await api.messages.create(messages=opened, **about)
        assert third.content[0].text == "ve"  # type: ignore[union-attr]
        with pytest.raises(BadRequestError, match="no function of the caller"):
            await api.messages.create(
                messages=HI,
                model="policy",
                max_tokens=9,
                tools=[{"type": "web_search_20250305"}],  # type: ignore[list-item]
            )
        with pytest.raises(AuthenticationError, match="no session of a running episode"):
            await api.with_options(api_key="x").messages.create(messages=HI, **about)
        assert turns(asking) == [2, 1]

    asked(scenario, saying(CALL, "five.", "ve."))


async def _refused(asking: Asking, messages: Any, told: str, **more: Any) -> None:
    api = anthropic_client(asking)
    with pytest.raises(BadRequestError, match=told):
        await api.messages.create(model="policy", max_tokens=9, messages=messages, extra_body=more)


def test_messages_with_thinking_or_texts_for_true_are_refused() -> None:
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}

    async def scenario(asking: Asking) -> None:
        await _refused(asking, [*HI, thought, *HI], "does not read reasoning_content")
        await _refused(asking, HI, "stream must be true or false", stream="false")

    asked(scenario)


@pytest.mark.parametrize("grows", [True, False])
def test_messages_are_streamed(grows: bool) -> None:
    async def scenario(asking: Asking) -> None:
        api = anthropic_client(asking)
        async with api.messages.stream(model="policy", max_tokens=3, messages=HI) as stream:
            pieces = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert pieces == final.content[0].text == "Hi!"  # type: ignore[union-attr]
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 4)
        assert final.usage.input_tokens > 5
        tools: Any = [MESSAGES_TOOL]
        async with api.messages.stream(
            model="policy", max_tokens=99, messages=HI, tools=tools
        ) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.content[1].input == {"a": 1}  # type: ignore[union-attr]

    asked(scenario, saying("Hi!.", CALL, lockstep=not grows))
