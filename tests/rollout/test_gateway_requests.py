"""What clients ask of the gateway: refusals, budgets, streams, deadlines; clients that go away."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError

from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.gateway import gateway
from tests.rollout import asking as asking_module
from tests.rollout.asking import (
    HELLO,
    ROWS,
    STOP,
    Asking,
    answering,
    asked,
    limits,
    on_torch,
    specs,
)
from tests.rollout.chat_models import CHATML, tiny_model
from tests.rollout.scripted import ScriptedEngine
from tests.rollout.test_gateway import played


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_what_one_session_sends_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that prints names, a context of a million tokens, and two megabytes in a name."""
    named = CHATML.replace("{{ m['content'] }}", "{{ m.get('name', '') }}: {{ m['content'] }}")
    monkeypatch.setattr(asking_module, "CHATML", named)
    large = {"messages": [{"role": "user", "content": "hi", "name": "ab " * 100_000}]}
    engine = answering()
    engine.max_model_len = 1_000_000

    async def scenario(asking: Asking) -> None:
        sent = asyncio.create_task(asking.post(large))
        other = asking.gateway.open(specs(2)[1])
        headers = {"Authorization": f"Bearer {other.key}"}
        url, answered = f"{asking.gateway.base_url(other)}/models", 0
        while not sent.done():
            assert (await asking.http.get(url, headers=headers)).status_code == 200
            answered += 1
        assert (await sent).status_code == 200
        (sample,) = asking.session.end(1.0, {}).samples
        assert sum(mask == 0 for mask in sample.loss_mask) > 300_000
        # One, or two, where the other is read before anything else is done.
        assert answered > 2

    asked(scenario, engine)


def test_an_exception_of_a_template_is_its_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "{% for m in messages %}{{ 1 // (m['content'] | length - 7) }}{% endfor %}"
    monkeypatch.setattr(asking_module, "CHATML", CHATML + broken)

    async def scenario(asking: Asking) -> None:
        refused = await asking.post({"messages": [{"role": "user", "content": "sevensx"}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_messages")
        assert (await asking.post(HELLO)).status_code == 200

    asked(scenario)


def test_other_endpoints_are_named_by_those_that_there_are() -> None:
    async def scenario(asking: Asking) -> None:
        for method, path, status in (("POST", "embeddings", 404), ("PUT", "chat/completions", 405)):
            found = await asking.http.request(method, f"{asking.url}/{path}")
            assert found.status_code == status
            assert found.json()["error"]["code"] == "not_found"
            assert "POST .../v1/chat/completions" in found.json()["error"]["message"]

    asked(scenario)


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


class Hanging(ScriptedEngine):
    """Answers nothing while it `hangs`."""

    def __init__(self) -> None:
        super().__init__(lambda sequence, turn: 2, STOP, lockstep=False)
        self.hangs = False
        self.asked, self.given_up = asyncio.Event(), asyncio.Event()

    async def generate(self, requests: Any) -> list[Completion]:
        if self.hangs:
            self.asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        return await super().generate(requests)


def test_a_request_whose_client_is_gone_has_not_been() -> None:
    engine = Hanging()

    async def give_up(asking: Asking, body: Any) -> None:
        engine.hangs = True
        posting = asyncio.create_task(asking.post(body))
        await engine.asked.wait()
        engine.asked.clear()
        engine.hangs = False
        posting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posting

    async def scenario(asking: Asking) -> None:
        await give_up(asking, HELLO)
        text = (await asking.post(HELLO)).json()["choices"][0]["message"]["content"]
        messages = [*HELLO["messages"], {"role": "assistant", "content": text}]  # type: ignore[misc]
        following = [*messages, {"role": "user", "content": "and"}]
        await engine.given_up.wait()
        engine.given_up.clear()
        await give_up(asking, {"messages": following})
        assert (await asking.post({"messages": following})).status_code == 200
        await engine.given_up.wait()
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
                while not (lockstep and self.cancelled):
                    await asyncio.sleep(0.01)
            return await super().generate(requests)

    engine = Slow(lambda sequence, turn: 2, STOP, lockstep=lockstep)

    async def scenario(asking: Asking) -> None:
        refused = await asking.post(HELLO)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "call_timeout"
        assert "over 0.2 s (environment.call_timeout_seconds)" in error["message"]
        assert engine.cancelled == [-1] * lockstep
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
        for ids in (first, [8, 6, 7, ROWS - 1]):
            assert (await ask(ids)).status_code == 200
        assert (await asking.post(HELLO)).status_code == 200
        for ids, message in (([], "at least one"), ([-1], "from 0 to"), ("x", "must be a list")):
            assert message in (await ask(ids)).json()["error"]["message"]
        beyond = (await ask([ROWS])).json()["error"]["message"]
        assert beyond == f"token_ids must be whole numbers from 0 to {ROWS - 1}"
        masked = (await ask(first, bad_words=["x"])).json()["error"]["message"]
        assert "sampling_params.bad_words is not supported" in masked
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


def test_nobody_takes_a_gateways_port_while_its_agents_may_ask_there() -> None:
    """An agent may go on after its rollout: it gets no answer, and then one that refuses it."""
    ports = []

    async def scenario(asking: Asking) -> None:
        ports.append(urlsplit(asking.url).port or 0)
        assert (await asking.post(HELLO)).status_code == 200

    asked(scenario)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", ports[0]))
    with socket.create_connection(("127.0.0.1", ports[0]), timeout=5) as late:
        late.sendall(b"GET /old/v1/models HTTP/1.0\r\nauthorization: Bearer x\r\n\r\n")
        asked(scenario)
        assert b" 401 " in late.recv(4096).partition(b"\r\n")[0]
    assert ports[0] == ports[1]
