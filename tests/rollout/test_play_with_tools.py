"""Calls of tools in the agent loop and through the gateway: real hosts, an engine that calls."""

from __future__ import annotations

import asyncio
import json
from itertools import chain
from typing import Any

import pytest
from openai import AsyncOpenAI

from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.rollout.agent_loop import play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import Tools
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.gateway import Gateway
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.rollout.rollout_stats import RolloutStats, example, rollout_metrics
from earl_core.trajectory.samples import Episode, EpisodeSpec
from tests.environments.test_tools import SHOP, USER
from tests.rollout.scripted import SayingEngine
from tests.rollout.test_tool_calls import FAMILIES, chat_of, schema

QWEN = "Qwen, Hermes, SmolLM3, EXAONE"


def specs_of(count: int) -> list[EpisodeSpec]:
    return [EpisodeSpec(number, number // 2, number // 2, seed=number) for number in range(count)]


def written(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def saying(chat: ChatTokenizer, *turns: str) -> Any:
    return lambda sequence, turn: [*chat.encode(turns[turn]), chat.stop_token_ids[0]]


def played(
    engine: SayingEngine, chat: ChatTokenizer, count: int = 2, here: bool = True, **options: Any
) -> tuple[list[Episode], LoadMeter]:
    """here: without a host process, whose start takes seconds of a core."""

    async def run() -> list[Episode]:
        pool = EnvironmentPool(SHOP, tools=[f"{USER}:add", f"{USER}:slow"], here=here)
        await pool.start()
        try:
            limits = PlaySettings(**{"max_turns": 8, "max_tokens_per_turn": 500, **options})
            return await play(engine, pool, chat, specs_of(count), limits, meter=meter)
        finally:
            await pool.stop()

    meter = LoadMeter(count)
    return asyncio.run(run()), meter


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("family", [QWEN, "SmolLM2, which knows no tools", "Mistral 0.3"])
def test_calls_results_and_the_last_answer_are_one_sample(lockstep: bool, family: str) -> None:
    chat = chat_of(FAMILIES[family])
    turns = [
        f"I buy.\n{written('buy', item='tea')}\n{written('add', first=1, second=2)}",
        "<tool_call>oh",
        written("nothing"),
        "done",
    ]
    if family.startswith("Mistral"):
        calls = [{"name": "buy", "arguments": {"item": "tea"}}]
        calls += [{"name": "add", "arguments": {"first": 1, "second": 2}}]
        turns[0] = f"[TOOL_CALLS] {json.dumps(calls)}"
        turns[1], turns[2] = "[TOOL_CALLS]oh", '[TOOL_CALLS] [{"name": "nothing"}]'
    engine = SayingEngine(saying(chat, *turns), lockstep=lockstep)
    episodes, meter = played(engine, chat, here=family != QWEN)
    for episode in episodes:
        assert (episode.finish_reason, episode.turns) == ("done", 4)
        assert episode.total_reward == 1.0
        (sample,) = episode.samples
        sampled = [[*chat.encode(turn), chat.stop_token_ids[0]] for turn in turns]
        assert sample.trained_tokens == sum(map(len, sampled))
        pairs = zip(sample.tokens, sample.loss_mask, strict=True)
        assert [token for token, trained in pairs if trained] == list(chain(*sampled))
        text = chat.encode("bought tea")
        assert any(sample.tokens[at : at + len(text)] == text for at in range(len(sample.tokens)))
        shown = example(episode)["turns"]
        assert shown[0]["answer"] == turns[0]
        assert shown[1]["observation"] == "bought tea\n3"
        assert "the call could not be read" in shown[2]["observation"]
        assert "there is no tool 'nothing': use add, slow, buy" in shown[3]["observation"]
    assert (meter.tool_calls, meter.tool_errors) == (6, 4)
    metrics = rollout_metrics(RolloutStats.of(episodes, meter))
    assert metrics["tool_calls"] == 6
    assert metrics["tool_seconds"] >= 0


def test_tool_time_is_counted_apart() -> None:
    chat = chat_of(FAMILIES[QWEN])
    engine = SayingEngine(saying(chat, written("slow", seconds=1.5), "done"))
    _, meter = played(engine, chat)
    assert meter.tool_wait > 2.9
    assert meter.environment_wait < 2.9


def test_calls_end_at_the_budget_of_turns() -> None:
    chat = chat_of(FAMILIES[QWEN])
    turns = [written("add", first=1, second=2)] * 3
    episodes, _ = played(SayingEngine(saying(chat, *turns)), chat, max_turns=3)
    assert {episode.finish_reason for episode in episodes} == {"max_turns"}


def test_an_agent_calls_tools_of_its_own_through_the_gateway() -> None:
    chat = chat_of(FAMILIES[QWEN])
    turns = [f"Let me see.\n{written('search', text='x')}", "It is x.", "again"]
    engine = SayingEngine(saying(chat, *turns), lockstep=False)
    tools: list[Any] = [schema("search")]

    async def run() -> Episode:
        limits = PlaySettings(max_turns=8)
        async with Gateway(engine, chat, limits, LoadMeter(1)) as gateway:
            session = gateway.open(specs_of(1)[0])
            api = AsyncOpenAI(base_url=gateway.base_url(session), api_key=session.key)
            ask = api.chat.completions.create
            said: list[Any] = [{"role": "user", "content": "What is it?"}]
            reply = await ask(model="", messages=said, tools=tools)
            message = reply.choices[0].message
            assert reply.choices[0].finish_reason == "tool_calls"
            assert message.content == "Let me see."
            (call,) = message.tool_calls or []
            assert call.type == "function"
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "search",
                {"text": "x"},
            )
            said += [message.model_dump(exclude_none=True)]
            said += [{"role": "tool", "tool_call_id": call.id, "content": "x is x"}]
            stream = await ask(model="", messages=said, tools=tools, stream=True)
            parts = [part.choices[0].delta.content or "" async for part in stream]
            assert "".join(parts) == "It is x."
            # Other tools mean another prompt.
            await ask(model="", messages=[said[0]])
            gateway.failed.cancel()
            await api.close()
            return session.end(1.0, {})

    episode = asyncio.run(run())
    first, second = episode.samples
    assert (len(first.turn_starts), len(second.turn_starts)) == (2, 1)
    said = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": turns[0]}]
    said += [{"role": "tool", "content": "x is x"}, {"role": "assistant", "content": turns[1]}]
    whole = chat.encode(chat.render(said, Tools(tools), False))  # type: ignore[arg-type]
    assert first.tokens == whole[: len(first.tokens)]
    assert chat.render(said[:1]) == chat.raw_text_of(second.tokens)[: len(chat.render(said[:1]))]  # type: ignore[arg-type]


def test_streamed_calls_are_what_clients_join() -> None:
    chat = chat_of(FAMILIES[QWEN])
    turn = written("search", text="a") + written("add_up", number=1)
    engine = SayingEngine(saying(chat, turn), lockstep=False)
    tools: list[Any] = [schema("search"), schema("add_up")]

    async def run() -> None:
        async with Gateway(engine, chat, PlaySettings(max_turns=8), LoadMeter(1)) as gateway:
            session = gateway.open(specs_of(1)[0])
            api = AsyncOpenAI(base_url=gateway.base_url(session), api_key=session.key)
            said: list[Any] = [{"role": "user", "content": "What is it?"}]
            async with api.chat.completions.stream(model="", messages=said, tools=tools) as stream:
                final = (await stream.get_final_completion()).choices[0]
            calls = final.message.tool_calls or []
            assert [call.function.name for call in calls] == ["search", "add_up"]
            assert final.finish_reason == "tool_calls"
            assert len({call.id for call in calls}) == 2
            gateway.failed.cancel()
            await api.close()

    asyncio.run(run())
