"""A gateway with one session, a client of it, and an engine that answers what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.gateway import Gateway
from earl_core.rollout.gateway.session import Session
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.trajectory.samples import EpisodeSpec
from tests.rollout.chat_models import CHATML, char_tokenizer
from tests.rollout.scripted import ScriptedEngine

STOP = char_tokenizer(CHATML).convert_tokens_to_ids("<|im_end|>")

ROWS = 128
"""Of the model, which are more than the tokenizer has tokens."""


def limits(**options: Any) -> PlaySettings:
    return PlaySettings(**({"max_turns": 8, "max_tokens_per_turn": 3} | options))


def specs(count: int) -> list[EpisodeSpec]:
    return [EpisodeSpec(i, i // 2, i // 2, seed=7 + i) for i in range(count)]


async def on_torch(model: Path, run: Callable[[TorchEngine], Awaitable[Any]]) -> Any:
    engine = TorchEngine(model, dtype="float32", threads=1)
    await engine.start()
    try:
        return await run(engine)
    finally:
        await engine.stop()


def answering(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda sequence, turn: 2, STOP, **options)


class Asking:
    """A gateway with one session, and a client of it."""

    def __init__(self, engine: Any, settings: PlaySettings) -> None:
        self.engine, self.settings = engine, settings

    async def __aenter__(self) -> Asking:
        chat = ChatTokenizer(char_tokenizer(CHATML), rows=ROWS)
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
