"""Runs an engine on an event loop of its own, so that tests stay plain functions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from tests.engines.models import prompt_of

_T = TypeVar("_T")

PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((5, 17, 40, 9, 33, 64, 21, 3))]


class Driver:
    """An engine, its loop and the model it was made from."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self.engine = engine
        self.directory = directory
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The coroutine's result."""
        return self._loop.run_until_complete(coroutine)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answers, after which the sequences are kept."""
        return self.run(self.engine.generate(requests))

    def answer(self, prompt: Sequence[int], **options: Any) -> Completion:
        """One answer to one prompt; the sequence is forgotten afterwards."""
        item = request(0, prompt, **options)
        try:
            return self.generate([item])[0]
        finally:
            self.engine.finish([item.sequence_id])

    async def amid(self, count: int, tokens: int) -> asyncio.Task[list[Completion]]:
        """Answers that are being sampled, of which each has so many tokens in the end."""
        begun = {index: asyncio.Event() for index in range(count)}

        def asked(index: int) -> GenerationRequest:
            told = lambda _: begun[index].set()  # noqa: E731
            return request(index, PROMPTS[index], max_tokens=tokens, on_tokens=told)

        running = asyncio.create_task(self.engine.generate([asked(index) for index in begun]))
        if self.engine.lockstep:  # it tells nothing before the end
            await asyncio.sleep(0.01)
        else:
            for each in begun.values():
                await each.wait()
        return running

    def close(self) -> None:
        """Stop the engine and end the loop."""
        self.run(self.engine.stop())
        self._loop.close()


def request(sequence_id: int, prompt: Sequence[int], **options: Any) -> GenerationRequest:
    """A request with the tests' usual settings."""
    settings: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 0.7,
        "seed": 1000 + sequence_id,
        "stop_token_ids": (),
    }
    settings.update(options)
    return GenerationRequest(sequence_id=sequence_id, tokens=list(prompt), **settings)


def batch(driver: Driver, **options: object) -> list[Completion]:
    """Answers to all of `PROMPTS`; the sequences are forgotten afterwards."""
    requests = [request(index, prompt, **options) for index, prompt in enumerate(PROMPTS)]
    answers = driver.generate(requests)
    driver.engine.finish(range(len(PROMPTS)))
    return answers
