"""Answers that are sent as they grow: the pieces together are the answer, whatever its tokens."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.gateway.pending import Growth
from tests.rollout.asking import HELLO, STOP, Asking, asked
from tests.rollout.chat_models import CHATML
from tests.rollout.scripted import ScriptedEngine
from tests.rollout.test_tool_calls import schema

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ã", "Ã¼", "âĤ", "Ġa", "ðŁ", "ĺĢ"]
"""A byte-level vocabulary's names of a half ü and a whole one, of parts of € and of an emoji."""


def byte_level() -> PreTrainedTokenizerFast:
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *MERGES[1:]]
    pairs = [(name[0], name[1:]) for name in MERGES[1:]]
    core = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return fast(core)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As sentencepiece has it: words with a mark for the space, and bytes for what is no word."""
    words = ["▁", "▁a", "b", "é", "\ufffd", "▁\ufffd", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: number for number, name in enumerate([*SPECIAL, "<unk>", *words])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast(core)


def fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIAL[0],
        extra_special_tokens=SPECIAL[1:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("prefix", ["", "a"])
def test_pieces_of_random_tokens_are_the_text(make: Any, prefix: str) -> None:
    chat = ChatTokenizer(make(), answer_prefix=prefix)
    half = 0
    for number in range(300):
        chance = random.Random(number)
        # Mostly what UTF-8 can begin with and go on with.
        text = "".join(chance.choices("aü€😀 é", k=chance.randrange(12)))
        tokens = chat.encode(text) if chance.random() < 0.5 else []
        tokens += chance.choices(range(chat.vocabulary), k=chance.randrange(12))
        growth, said = Growth(chat), ""
        while tokens:
            some, tokens = tokens[: 1 + number % 3], tokens[1 + number % 3 :]
            growth.add(some)
            piece = growth.piece()
            said += piece
            whole = chat.text_of(growth._tokens)
            assert whole.startswith(said)
            assert not piece.endswith("\ufffd")
            half += whole.endswith("\ufffd")
    assert half > 100


class Growing(ScriptedEngine):
    """Tells its tokens one by one, `slow` seconds apart."""

    slow = 0.0
    ended = 0

    async def generate(self, requests: Any) -> list[Completion]:
        (request,) = requests
        (completion,) = await super().generate(requests)
        try:
            for token in completion.tokens[:-1]:
                if request.on_tokens is not None:
                    request.on_tokens([token])
                await asyncio.sleep(self.slow)
        except asyncio.CancelledError:
            self.ended += 1
            raise
        return [completion]


def growing(slow: float) -> Growing:
    engine = Growing(lambda sequence, turn: 12, STOP, lockstep=False)
    engine.slow = slow
    return engine


async def streamed(asking: Asking, body: dict[str, Any]) -> list[Any]:
    api = AsyncOpenAI(base_url=asking.url, api_key=asking.session.key, max_retries=0)
    stream = await api.chat.completions.create(
        model="policy", stream=True, stream_options={"include_usage": True}, **body
    )
    return [chunk async for chunk in stream]


def test_an_answer_comes_in_pieces_and_whole() -> None:
    async def scenario(asking: Asking) -> None:
        body: dict[str, Any] = {"messages": HELLO["messages"]}
        whole = (await asking.post(HELLO)).json()["choices"][0]["message"]["content"]
        chunks = await streamed(asking, {**body, "logprobs": True})
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == whole
        assert sum(bool(choice.delta.content) for choice in choices) > 2
        assert [choice.delta.role for choice in choices].count("assistant") == 1
        assert choices[-1].finish_reason == "stop"
        assert sum(len(c.logprobs.content) for c in choices if c.logprobs) == 13
        assert chunks[-1].usage.completion_tokens == 13
        # What beside calls is text is known at the end.
        chunks = await streamed(asking, {**body, "tools": [schema("f", {"type": "object"})]})
        texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert [text for text in texts if text] == [whole]
        (first, second, third) = asking.session.end(1.0, {}).samples
        assert first.tokens == second.tokens != third.tokens

    asked(scenario, growing(0.04), max_tokens_per_turn=20)


def test_a_client_that_goes_away_amid_the_answer_has_not_asked() -> None:
    engine = growing(0.05)

    async def scenario(asking: Asking) -> None:
        url, body = f"{asking.url}/chat/completions", {**HELLO, "stream": True}
        async with asking.http.stream("POST", url, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line:
                    assert json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"]
                    break
        while not engine.ended:
            await asyncio.sleep(0.01)
        assert (await asking.post(HELLO)).status_code == 200
        (sample,) = asking.session.end(1.0, {}).samples
        assert len(sample.turn_starts) == 1

    asked(scenario, engine, max_turns=1, max_tokens_per_turn=20)


def test_an_answer_over_its_time_ends_with_an_error() -> None:
    engine = growing(0.1)

    async def scenario(asking: Asking) -> None:
        with pytest.raises(APIError, match=r"environment\.call_timeout_seconds"):
            await streamed(asking, {"messages": HELLO["messages"]})
        assert engine.ended == asking.gateway._meter.calls_timed_out == 1
        assert asking.session.fail("environment_error", "").samples == []

    asked(scenario, engine, call_seconds=0.4, max_tokens_per_turn=20)


def test_what_is_refused_is_refused_before_the_first_piece() -> None:
    async def scenario(asking: Asking) -> None:
        body = {**HELLO, "stream": True}
        assert "data: [DONE]" in (await asking.post(body)).text
        spent = await asking.post(body)
        assert (spent.status_code, spent.json()["error"]["code"]) == (400, "budget_spent")

    asked(scenario, growing(0.0), max_turns=1)
