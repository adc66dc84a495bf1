"""Agents that know OpenAI's API only, on a real engine, from processes of their own."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI, AuthenticationError
from transformers import AutoModelForCausalLM

from earl_core.environments.pool import EnvironmentPool
from earl_core.environments.registry import check
from earl_core.rollout.agent_loop import play
from earl_core.rollout.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.errors import ContextOverflow, RolloutFailed
from earl_core.rollout.gateway import gateway
from earl_core.rollout.gateway.gateway import Gateway
from earl_core.rollout.gateway.play import play_agents
from earl_core.rollout.gateway.session import Session
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import Episode, EpisodeSpec
from tests.rollout.chat_models import CHATML, char_tokenizer, tiny_model
from tests.rollout.scripted import ScriptedEngine
from tests.rollout.test_agent_loop import check_columns
from tests.rollout.test_play_with_torch import GAME, LocalEnvironments
from tests.rollout.test_tool_calls import schema

TEMPERATURE = 0.7
STOP = char_tokenizer(CHATML).convert_tokens_to_ids("<|im_end|>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def limits(**options: Any) -> PlaySettings:
    return PlaySettings(**({"max_turns": 8, "max_tokens_per_turn": 3} | options))


def specs(count: int) -> list[EpisodeSpec]:
    return [EpisodeSpec(i, i // 2, i // 2, seed=7 + i) for i in range(count)]


async def played(
    engine: Any,
    agent: str,
    count: int,
    settings: PlaySettings,
    options: dict[str, Any] | None = None,
    seconds: float = 30.0,
) -> tuple[list[Episode], LoadMeter, EnvironmentPool]:
    chat = ChatTokenizer(char_tokenizer(CHATML))
    name = f"agent:tests.rollout.agents:{agent}"
    pool = EnvironmentPool(name, options, step_timeout_seconds=seconds)
    await pool.start()
    meter = LoadMeter(count)
    try:
        found = await play_agents(engine, pool, chat, specs(count), settings, meter=meter)
    finally:
        await pool.stop()
    return found, meter, pool


async def on_torch(model: Path, run: Callable[[TorchEngine], Awaitable[Any]]) -> Any:
    engine = TorchEngine(model, dtype="float32", threads=1)
    await engine.start()
    try:
        return await run(engine)
    finally:
        await engine.stop()


def answering(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda sequence, turn: 2, STOP, **options)


def test_greedy_games_are_those_of_the_agent_loop(model: Path) -> None:
    """Tokens, masks, log-probs, rewards and outcomes."""
    settings = limits(temperature=0.0)

    async def both(engine: TorchEngine) -> Any:
        agents, _, _ = await played(engine, "tic_tac_toe", 12, settings, {"game": GAME})
        chat = ChatTokenizer(char_tokenizer(CHATML))
        return agents, await play(engine, LocalEnvironments(), chat, specs(12), settings)

    agents, builtin = asyncio.run(on_torch(model, both))
    check_columns(agents)
    assert max(episode.turns for episode in agents) > 1
    for one, other in zip(agents, builtin, strict=True):
        (mine,), (theirs,) = one.samples, other.samples
        # The loop knows of its last turn, an agent asks once more.
        assert one.finish_reason == other.finish_reason
        assert one.info == other.info
        assert one.total_reward == pytest.approx(other.total_reward)
        assert mine.tokens == theirs.tokens
        assert mine.loss_mask == theirs.loss_mask
        assert mine.turn_starts == theirs.turn_starts
        assert mine.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=1e-5)


def test_logprobs_are_those_of_a_teacher_forced_forward(model: Path) -> None:
    settings = limits(temperature=TEMPERATURE)
    game = {"game": GAME}
    episodes, meter, _ = asyncio.run(
        on_torch(model, lambda engine: played(engine, "tic_tac_toe", 12, settings, game))
    )
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained = 0
    for episode in episodes:
        (sample,) = episode.samples
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = network(tokens[None]).logits[0, :-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:]).bool()
        trained += int(mask.sum())
        recorded = torch.tensor(sample.rollout_logprobs[1:])
        assert torch.allclose(recorded[mask], expected[mask], atol=1e-4)
    assert trained == meter.generated_tokens > 100
    assert meter.episodes_done == 12
    assert meter.running_max > 6, "waiting requests are answered together"


def test_draws_depend_on_episode_conversation_and_call_alone(model: Path) -> None:
    settings = limits(temperature=1.0)

    async def alone_and_together(engine: TorchEngine) -> Any:
        found = [await played(engine, "two_at_once", 6, settings) for _ in range(2)]
        return [episodes for episodes, _, _ in found]

    first, second = asyncio.run(on_torch(model, alone_and_together))
    for one, other in zip(first, second, strict=True):
        streams = [sorted(sample.tokens for sample in each.samples) for each in (one, other)]
        assert streams[0] == streams[1]
        assert len({tuple(tokens) for tokens in streams[0]}) == 3


def test_conversations_of_a_session_are_samples_of_their_own() -> None:
    episodes, meter, _ = asyncio.run(played(answering(lockstep=False), "two_at_once", 4, limits()))
    check_columns(episodes)
    for episode in episodes:
        assert sorted(len(sample.turn_starts) for sample in episode.samples) == [1, 3, 3]
        assert episode.total_reward == 1.0
    assert meter.generated_tokens == 4 * 7 * 3


def test_a_plain_function_is_an_agent_too() -> None:
    episodes, _, _ = asyncio.run(played(answering(), "in_a_thread", 6, limits()))
    assert [episode.total_reward for episode in episodes] == [2.0] * 6


FAULTS = {
    "0": "raises",
    "1": "nothing",
    "2": "no reward",
    "3": "silent",
    "4": "hangs",
    "5": "greedy",
    "6": "content",
    "7": "hangs at once",
}


def test_what_an_agent_does_wrong_costs_its_own_episode() -> None:
    settings = limits(max_failed_share=1.0)
    options = {"faults": FAULTS}
    found, meter, pool = asyncio.run(
        played(answering(), "unreliable", 18, settings, options, seconds=2.0)
    )
    reasons = [episode.finish_reason for episode in found[::2]]
    assert reasons[:4] == ["environment_error"] * 4
    assert reasons[4:7] == ["environment_timeout", "max_turns", "max_turns"]
    assert reasons[7:] == ["environment_timeout", "done"]
    details = [str(episode.info.get("failure")) for episode in found[::2]]
    assert "this agent is broken" in details[0]
    assert "reward must be a finite number" in details[1]
    assert "dict without a reward" in details[2]
    assert "without a single answer" in details[3]
    assert "asyncio.sleep(3600)" in details[4]
    rewards = [found[number].total_reward for number in (10, 12, 16)]
    assert rewards == [0.0, 0.5, 1.0]
    assert found[-1].info == {"outcome": "win", "metrics": {"index": 8}}
    assert meter.episodes_failed == 12
    assert pool.host_restarts == 0, "one that waits costs no other agent its process"


@pytest.mark.parametrize("fault", ["dies", "blocks"])
def test_agents_of_a_lost_process_are_played_anew(fault: str) -> None:
    settings = limits(max_failed_share=0.0)
    once: dict[str, Any] = {"faults": {"0": fault}}
    with pytest.raises(RolloutFailed, match="of 4 episodes failed"):
        asyncio.run(played(answering(), "unreliable", 4, settings, once, seconds=2.0))


def test_too_many_failures_end_the_rollout() -> None:
    options = {"faults": {str(number): "raises" for number in range(8)}}
    with pytest.raises(RolloutFailed, match="this agent is broken"):
        asyncio.run(played(answering(), "unreliable", 16, limits(), options))


def test_a_context_that_is_too_short_for_the_engine_alone_ends_the_rollout() -> None:
    engine = answering(max_model_len=24)
    with pytest.raises(ContextOverflow):
        asyncio.run(played(engine, "unreliable", 4, limits(positions=4096), {"faults": {}}))


def test_the_models_own_context_ends_an_episode() -> None:
    engine = answering(max_model_len=90)
    options = {"game": GAME}
    settings = limits(max_failed_share=1.0, positions=90)
    found, _, _ = asyncio.run(played(engine, "tic_tac_toe", 4, settings, options))
    assert {episode.finish_reason for episode in found} == {"model_context"}
    assert max(episode.context_tokens for episode in found) <= 90


def test_what_is_no_agent_is_refused_before_work_starts() -> None:
    with pytest.raises(ConfigError, match=r"is no function of \(task, base_url, api_key\)"):
        check("agent:tests.rollout.agents:client")
    with pytest.raises(ConfigError, match="no_such"):
        check("agent:tests.rollout.agents:no_such")


class Asking:
    """A gateway with one session, and a client of it."""

    def __init__(self, engine: Any, settings: PlaySettings) -> None:
        self.engine, self.settings = engine, settings

    async def __aenter__(self) -> Asking:
        chat = ChatTokenizer(char_tokenizer(CHATML))
        self.gateway = Gateway(self.engine, chat, self.settings, LoadMeter(1))
        await self.gateway.__aenter__()
        self.session: Session = self.gateway.open(specs(1)[0])
        self.url = self.gateway.base_url(self.session)
        headers = {"Authorization": f"Bearer {self.session.key}"}
        self.http = httpx.AsyncClient(headers=headers, timeout=20)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.http.aclose()
        self.gateway.failed.cancel()
        await self.gateway.__aexit__()

    async def post(self, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.url}/chat/completions"
        return await self.http.post(url, content=content, **options)


def asked(
    scenario: Callable[[Asking], Awaitable[None]], engine: Any = None, **options: Any
) -> None:
    async def run() -> None:
        async with Asking(engine or answering(), limits(**options)) as asking:
            await scenario(asking)

    asyncio.run(run())


HELLO = {"model": "x", "messages": [{"role": "user", "content": "hello"}]}
BROKEN_CALL = {"name": "f", "arguments": "["}
REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "no JSON"),
    "no object": ([], "JSON object"),
    "no messages": ({"messages": []}, "at least one message"),
    "n": ({**HELLO, "n": 2}, "n must be 1"),
    "a tool": ({**HELLO, "tools": [{"type": "function"}]}, "a tool is described by"),
    "a schema": ({**HELLO, "tools": [schema("f", {"type": 7})]}, "are no JSON schema"),
    "a choice": ({**HELLO, "tool_choice": "required"}, "tool_choice must be auto or none"),
    "a call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": BROKEN_CALL}]}]},
        "arguments of 'f' are no JSON object",
    ),
    "stop": ({**HELLO, "stop": ["\n"]}, "rollout.stop"),
    "a role": ({"messages": [{"role": "judge", "content": ""}]}, "one of the roles"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "no text",
    ),
    "no text": ({"messages": [{"role": "user", "content": None}]}, "must be a text"),
    "a surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "UTF-8"),
    "a budget": ({**HELLO, "max_tokens": 0.5}, "whole number above 0"),
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


def test_a_wrong_key_and_a_session_that_is_over_are_refused() -> None:
    async def scenario(asking: Asking) -> None:
        for headers in ({"Authorization": "Bearer x"}, {"Authorization": ""}):
            assert (await asking.post(HELLO, headers=headers)).status_code == 401
            models = await asking.http.get(f"{asking.url}/models", headers=headers)
            assert models.status_code == 401
        assert (await asking.http.get(f"{asking.url}/models")).json()["data"][0]["id"] == "policy"
        other = asking.gateway.open(specs(2)[1])
        wrong = AsyncOpenAI(base_url=asking.gateway.base_url(other), api_key=asking.session.key)
        with pytest.raises(AuthenticationError, match="no session of a running episode"):
            await wrong.models.list()
        asking.session.end(0.0, {})
        assert (await asking.post(HELLO)).status_code == 410
        await asking.gateway.close(asking.session)
        assert (await asking.post(HELLO)).status_code == 401

    asked(scenario)


def test_budgets_are_told_and_end_the_episode() -> None:
    async def scenario(asking: Asking) -> None:
        usage = (await asking.post({**HELLO, "max_tokens": 1})).json()["usage"]
        assert usage["completion_tokens"] == 1
        assert (await asking.post(HELLO)).json()["choices"][0]["finish_reason"] == "length"
        spent = await asking.post(HELLO)
        assert spent.status_code == 400
        assert spent.json()["error"]["code"] == "budget_spent"
        assert asking.session.fail("environment_error", "").finish_reason == "max_tokens"

    asked(scenario, max_tokens_per_episode=3)


def test_a_streamed_answer_is_the_same_answer(model: Path) -> None:
    async def both(engine: TorchEngine) -> list[str]:
        texts = []
        for stream in (False, True):
            async with Asking(engine, limits(temperature=1.0, max_tokens_per_turn=9)) as asking:
                api = AsyncOpenAI(base_url=asking.url, api_key=asking.session.key)
                messages: Any = HELLO["messages"]
                if not stream:
                    reply = await api.chat.completions.create(
                        model="policy",
                        messages=messages,
                        logprobs=True,
                        extra_body={"return_token_ids": True},
                    )
                    choice = reply.choices[0]
                    texts.append(choice.message.content or "")
                    (sample,) = asking.session.end(1.0, {}).samples
                    ids = choice.token_ids  # type: ignore[attr-defined]
                    assert reply.prompt_token_ids + ids == sample.tokens  # type: ignore[attr-defined]
                    whole = {"policy_version": 0, "first": 0, "end": len(ids)}
                    assert choice.spans == [whole]  # type: ignore[attr-defined]
                    assert choice.logprobs is not None
                    values = [each.logprob for each in choice.logprobs.content or []]
                    assert values == sample.rollout_logprobs[-len(ids) :]
                    continue
                parts = await api.chat.completions.create(
                    model="policy",
                    messages=messages,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                chunks = [part async for part in parts]
                assert chunks[-1].usage is not None
                deltas = [c.choices[0].delta.content for c in chunks if c.choices]
                texts.append("".join(delta or "" for delta in deltas))
        return texts

    first, second = asyncio.run(on_torch(model, both))
    assert first == second != ""


class Slow(ScriptedEngine):
    """Takes a while."""

    async def generate(self, requests: Any) -> list[Completion]:
        await asyncio.sleep(0.5)
        return await super().generate(requests)


def test_a_request_whose_client_is_gone_has_not_been() -> None:
    engine = Slow(lambda sequence, turn: 2, STOP, lockstep=False)

    async def scenario(asking: Asking) -> None:
        with pytest.raises(httpx.TimeoutException):
            await asking.post(HELLO, timeout=0.2)
        text = (await asking.post(HELLO)).json()["choices"][0]["message"]["content"]
        messages = [*HELLO["messages"], {"role": "assistant", "content": text}]  # type: ignore[misc]
        following = [*messages, {"role": "user", "content": "and"}]
        with pytest.raises(httpx.TimeoutException):
            await asking.post({"messages": following}, timeout=0.2)
        assert (await asking.post({"messages": following})).status_code == 200
        (sample,) = asking.session.end(1.0, {}).samples
        assert len(sample.turn_starts) == 2
        assert Counter(sample.loss_mask)[1] == 6
        assert len(engine.batches) == 2

    asked(scenario, engine, max_turns=2)


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_call_over_its_time_is_refused_and_has_not_been(lockstep: bool) -> None:
    class Slow(ScriptedEngine):
        slow = True

        async def generate(self, requests: Any) -> list[Completion]:
            if self.slow:
                self.slow = False
                # A batch of a lockstep engine goes on without the one that is cancelled.
                await asyncio.sleep(0.3 if lockstep else 3600)
            return await super().generate(requests)

    engine = Slow(lambda sequence, turn: 2, STOP, lockstep=lockstep)

    async def scenario(asking: Asking) -> None:
        refused = await asking.post(HELLO)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "call_timeout"
        assert "over 0.2 s (environment.call_timeout_seconds)" in error["message"]
        assert engine.cancelled == [0] * lockstep
        while (again := await asking.post(HELLO)).status_code == 400:
            assert again.json()["error"]["code"] == "call_timeout"
        assert asking.gateway._meter.calls_timed_out >= 1
        (sample,) = asking.session.end(1.0, {}).samples
        assert len(sample.turn_starts) == 1

    asked(scenario, engine, max_turns=1, call_seconds=0.2)


def test_what_the_engine_raises_ends_the_rollout() -> None:
    class Broken(ScriptedEngine):
        async def generate(self, requests: Any) -> list[Completion]:
            raise RuntimeError("the engine is broken")

    for lockstep in (True, False):
        engine = Broken(lambda sequence, turn: 2, STOP, lockstep=lockstep)
        with pytest.raises(RuntimeError, match="the engine is broken"):
            asyncio.run(played(engine, "unreliable", 4, limits(), {"faults": {}}))


def test_token_ids_go_on_where_the_answer_ended_and_are_recorded_as_they_are() -> None:
    async def scenario(asking: Asking) -> None:
        url = asking.url.removesuffix("/v1") + "/inference/v1/generate"

        async def ask(ids: Any, **sampling: Any) -> httpx.Response:
            return await asking.http.post(url, json={"token_ids": ids, "sampling_params": sampling})

        first = [5, 6, 7]
        reply = (await ask(first, logprobs=0, max_tokens=100)).json()["choices"][0]
        assert reply["finish_reason"] == "stop"
        assert len(reply["logprobs"]["content"]) == len(reply["token_ids"]) == 3
        second = [*first, *reply["token_ids"], 9, 9]
        reply = (await ask(second, max_tokens=1)).json()["choices"][0]
        assert (len(reply["token_ids"]), reply["finish_reason"]) == (1, "length")
        assert reply["logprobs"] is None
        # The same conversation again, one that differs, and one by messages: samples of their own.
        for ids in (first, [8, 6, 7, 1]):
            assert (await ask(ids)).status_code == 200
        assert (await asking.post(HELLO)).status_code == 200
        for ids, message in (([], "at least one"), ([-1], "from 0 to"), ("x", "must be a list")):
            assert message in (await ask(ids)).json()["error"]["message"]
        assert "stop is not supported" in (await ask(first, stop=["x"])).json()["error"]["message"]
        episode = asking.session.end(1.0, {})
        assert [len(sample.turn_starts) for sample in episode.samples] == [2, 1, 1, 1]
        assert episode.samples[0].tokens[: len(second)] == second
        assert episode.samples[0].loss_mask[: len(second) + 1] == [0] * 3 + [1] * 3 + [0] * 2 + [1]
        wrong = await asking.http.post(url, json={}, headers={"Authorization": "Bearer x"})
        assert wrong.status_code == 401

    asked(scenario)


def test_a_standing_session_is_renewed_and_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_STANDING_BRANCHES", 2)
    monkeypatch.setattr(gateway, "_STANDING_SECONDS", 0.01)
    engine = answering()

    async def scenario(asking: Asking) -> None:
        over = asyncio.Event()
        standing = asyncio.create_task(asking.gateway.stand("the key", over.is_set))
        url = asking.url.replace(f"/{asking.session.name}", "") + "/chat/completions"
        for number in range(8):
            said = {"messages": [{"role": "user", "content": str(number)}]}
            headers = {"Authorization": "Bearer the key"}
            assert (await asking.http.post(url, json=said, headers=headers)).status_code == 200
            await asyncio.sleep(0.05)
        assert (await asking.http.post(url, json=said)).status_code == 401
        assert len(engine.finished) >= 6
        assert len(asking.gateway._sessions) == 3
        over.set()
        await standing

    asked(scenario, engine)
