"""What an agent asks and what is recorded of it, compared by a path of its own.

What is recorded is compared with what went over the wire, rendered by transformers alone, and with
what the model was told to say.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway import gateway
from earl_core.rollout.gateway.play import play_agents
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.trajectory.samples import Episode, EpisodeSpec
from tests.rollout.chat_models import SPECIAL
from tests.rollout.scripted import SayingEngine
from tests.rollout.test_agent_loop import check_columns
from tests.rollout.tool_templates import QWEN


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, because prompts of frameworks have any character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        extra_special_tokens=list(SPECIAL[2:]),
    )
    fast.chat_template = QWEN
    return fast


TOKENIZER = byte_tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def encoded(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


class Wire:
    """Listens at the border of the gateway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refused: list[str] = []
        monkeypatch.setattr(gateway, "Starlette", self._listening)

    def _listening(self, **options: Any) -> Any:
        served = Starlette(**options)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body, status = b"", 0

            async def heard() -> Any:
                nonlocal body
                message = await receive()
                body += message.get("body", b"")
                return message

            async def said(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                if status >= 400:
                    self.refused.append(f"{scope['path']}: {status} {message.get('body', b'')!r}")
                await send(message)

            await served(scope, heard, said)
            if status == 200 and scope["method"] == "POST":
                self.asked.append(json.loads(body))

        return app


def spoken(content: Any) -> str:
    """The text of a content, of any of the APIs."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(each["text"] for each in parts)


def wire_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request, as chat templates take them."""
    if "messages" in body:
        given = body["messages"]
    else:
        given = []
        if body.get("instructions"):
            given.append({"role": "system", "content": body["instructions"]})
        for item in body["input"] if isinstance(body["input"], list) else [body["input"]]:
            kind = item.get("type", "message")
            if kind == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                if given[-1]["role"] != "assistant":
                    given.append({"role": "assistant", "content": "", "tool_calls": []})
                given[-1].setdefault("tool_calls", []).append({"function": function})
            elif kind == "function_call_output":
                given.append({"role": "tool", "content": item["output"]})
            else:
                given.append({"role": item["role"], "content": item["content"]})
    found = []
    for each in given:
        role = "system" if each["role"] == "developer" else each["role"]
        message: dict[str, Any] = {"role": role, "content": spoken(each.get("content"))}
        if calls := each.get("tool_calls"):
            functions = [call["function"] for call in calls]
            message["tool_calls"] = [
                {"function": {**each, "arguments": json.loads(each["arguments"] or "{}")}}
                for each in functions
            ]
        found.append(message)
    return found


def rendered(body: dict[str, Any]) -> list[int]:
    """The prompt of a request by transformers alone."""
    tools = [
        each if "function" in each else {"type": "function", "function": plain(each)}
        for each in body.get("tools") or []
    ]
    return encoded(
        TOKENIZER.apply_chat_template(
            wire_messages(body), tools=tools or None, add_generation_prompt=True, tokenize=False
        )
    )


def plain(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of Responses as chat completions have it; `strict` says nothing to a model."""
    return {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)}


def check_same(found: list[int], expected: list[int], where: str) -> None:
    """The message is both texts around their first difference."""
    if found != expected:
        one, other = (TOKENIZER.decode(each) for each in (found, expected))
        place = next(
            (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -80
        )
        cut = slice(max(0, place - 80), place + 80)
        raise AssertionError(f"{where}: {one[cut]!r} is not {other[cut]!r}")


class Scripted(SayingEngine):
    """Says its answers one after the other, from the first again for each episode."""

    def __init__(self, says: tuple[str, ...]) -> None:
        super().__init__(self._next, lockstep=False, max_model_len=100_000)
        self.says, self.count = says, 0

    def _next(self, sequence: int, turn: int) -> list[int]:
        self.count += 1
        return [*encoded(self.says[(self.count - 1) % len(self.says)]), STOP]

    @property
    def requests(self) -> list[GenerationRequest]:
        return [request for batch in self.batches for request in batch]


def played(
    agent: str, python: str, options: dict[str, Any], engine: Scripted, prompts: int = 2
) -> list[Episode]:
    """An episode of each prompt, one after the other."""

    async def run() -> list[Episode]:
        pool = EnvironmentPool(
            f"agent:{agent}",
            options,
            python=python,
            start_timeout_seconds=120,
            step_timeout_seconds=120,
        )
        await pool.start()
        try:
            return await play_agents(
                engine,
                pool,
                ChatTokenizer(TOKENIZER),
                [EpisodeSpec(i, i, i, seed=7 + i) for i in range(prompts)],
                PlaySettings(max_turns=16, max_live_episodes=1, max_failed_share=1.0),
                meter=LoadMeter(prompts),
            )
        finally:
            await pool.stop()

    return asyncio.run(run())


def recorded(episode: Episode) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each call, in their order, as the trainer gets them."""
    found = []
    for sample in episode.samples:
        ends = [*sample.turn_starts[1:], len(sample.tokens)]
        for start, end, number in zip(sample.turn_starts, ends, sample.turn_numbers, strict=True):
            said = start + sample.loss_mask[start:end].index(1)
            assert all(sample.loss_mask[said:end])
            found.append((number, sample.tokens[:said], sample.tokens[said:end]))
    return [(prompt, answer) for _, prompt, answer in sorted(found)]


def check_recorded(episodes: list[Episode], wire: Wire, engine: Scripted) -> None:
    """Each call of each episode is recorded exactly."""
    assert not wire.refused
    check_columns(episodes)
    calls = [call for episode in episodes for call in recorded(episode)]
    asked = len(episodes) * len(engine.says)
    assert len(calls) == len(wire.asked) == len(engine.requests) == asked
    for number, (body, request, (prompt, answer)) in enumerate(
        zip(wire.asked, engine.requests, calls, strict=True)
    ):
        expected = rendered(body)
        check_same(prompt, expected, f"the prompt of call {number}")
        check_same(list(request.tokens), expected, f"what the engine got in call {number}")
        said = encoded(engine.says[number % len(engine.says)])
        # The end of a string of `stop` ends an answer, too.
        ended = answer[-1] == STOP
        check_same(answer, [*said, STOP] if ended else said, f"the answer of call {number}")
