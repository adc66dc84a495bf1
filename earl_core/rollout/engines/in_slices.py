"""A lockstep engine as one that batches by itself: all that ask are answered some tokens at a time,
so that requests enter, answers end and weights change between two forward passes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.engines.wrapped import WrappedEngine

SLICE_TOKENS = 8
"""Tokens of each answer in a slice: few, because whoever asks or stops meanwhile waits for its
end."""

_LOOK_SECONDS = 0.002


@dataclass(eq=False)
class _Asked:
    """A request, with what is sampled of its answer, and the future of the whole answer."""

    request: GenerationRequest
    reply: asyncio.Future[Completion]


class EngineInSlices(WrappedEngine):
    """An `Engine` over a lockstep one. All methods are of one event loop.

    asking: how many answers will be asked for before the next slice may begin, where slices are
    counted (`advance`).
    """

    def __init__(self, engine: Engine, asking: Callable[[], int]) -> None:
        super().__init__(engine)
        self._asking = asking
        self._waiting: list[_Asked] = []
        self._held = False
        self._left = sys.maxsize
        self._wake = asyncio.Event()
        self._slice = asyncio.Lock()
        self._answering: asyncio.Task[None] | None = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample all answers, each in as many slices as it takes."""
        loop = asyncio.get_running_loop()
        asked = [_Asked(request, loop.create_future()) for request in requests]
        self._waiting += asked
        self._wake.set()
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())
        try:
            return list(await asyncio.gather(*(each.reply for each in asked)))
        finally:
            self._waiting = [each for each in self._waiting if each not in asked]

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        """End these requests; a slice that is running ends with what was sampled."""
        await self._engine.cancel(sequence_ids)
        for each in self._waiting:
            if each.request.sequence_id in sequence_ids and not each.reply.done():
                version = self._engine.policy_version or 0
                each.reply.set_result(each.request.ended("cancelled", version))

    async def hold(self) -> None:
        """Begin no slice until `go_on`; returns when none is running."""
        self._held = True
        async with self._slice:
            return

    def go_on(self) -> None:
        """Undo `hold`. Slices are no longer counted."""
        self._held, self._left = False, sys.maxsize
        self._wake.set()

    async def advance(self, slices: int) -> None:
        """Run so many slices, each when all have asked that will, and no more until the next call;
        fewer where nothing is left to answer."""
        self._held, self._left = False, slices
        self._wake.set()
        while (asking := self._asking()) and (self._left or len(self._waiting) < asking):
            await asyncio.sleep(_LOOK_SECONDS)
        self._left = 0

    async def _answer(self) -> None:
        while True:
            while self._held or not self._waiting or not self._may_begin():
                counted = self._left != sys.maxsize and not self._held
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), _LOOK_SECONDS if counted else None)
                except TimeoutError:
                    continue
            async with self._slice:
                if not self._held:
                    await self._answer_slice()

    def _may_begin(self) -> bool:
        counted = self._left != sys.maxsize
        return not counted or (self._left > 0 and len(self._waiting) >= self._asking())

    async def _answer_slice(self) -> None:
        # An order that is not that of arrival.
        batch = sorted(
            self._waiting, key=lambda each: (each.request.priority, each.request.sequence_id)
        )
        given = []
        for each in batch:
            most = each.request.max_tokens or sys.maxsize
            end = min(len(each.request.sampled) + SLICE_TOKENS, most)
            given.append(replace(each.request, max_tokens=end))
        try:
            answers = await self._engine.generate(given)
        except Exception as error:
            for each in batch:
                if not each.reply.done():
                    each.reply.set_exception(error)
            answers = []
        for each, answer in zip(batch, answers, strict=False):
            most = each.request.max_tokens or sys.maxsize
            if answer.finish_reason == "length" and len(answer.tokens) < most:
                each.request = each.request.after(answer)
            elif not each.reply.done():
                each.reply.set_result(answer)
        self._waiting = [each for each in self._waiting if not each.reply.done()]
        if self._left != sys.maxsize:
            self._left -= 1

    async def stop(self) -> None:
        """Answer nothing more. The engine itself goes on."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
