"""Requests to a lockstep engine, which wants whole batches: what waits is answered together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest

_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 0.003, 0.25, 0.1
"""A lockstep engine begins when no request came for this share of the last batch's seconds, between
these: a batch takes hardly longer than one answer, and agents ask one after the other."""


class Batches:
    """All methods belong to one event loop.

    askers: how many may ask now, each for one answer or several: a batch then waits for all of
    them, but `patience` seconds at most; None: nobody knows.
    """

    def __init__(self, engine: Engine, askers: Callable[[], int] | None, patience: float) -> None:
        self._engine = engine
        self._askers, self._patience = askers, patience
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion], str]] = []
        self._answering: asyncio.Task[None] | None = None
        self._pause = _SHORTEST_PAUSE

    async def ask(self, request: GenerationRequest, asker: str) -> Completion:
        """The answer, in a batch with all requests that wait. asker: the name of whoever asks."""
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, reply, asker))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_waiting())
        try:
            return await reply
        except asyncio.CancelledError:
            await self._engine.cancel([request.sequence_id])
            raise

    async def close(self) -> None:
        """Answer nothing more."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.wait({self._answering})

    async def _answer_waiting(self) -> None:
        while self._waiting:
            await self._gather()
            batch = [each for each in self._waiting if not each[1].done()]
            # An order that is not that of arrival.
            batch.sort(key=lambda each: each[0].sequence_id)
            self._waiting.clear()
            if not batch:
                continue
            began = time.perf_counter()
            try:
                completions = await self._engine.generate([request for request, *_ in batch])
            except Exception as error:
                for _, reply, _ in batch:
                    if not reply.done():
                        reply.set_exception(error)
                continue
            pause = _PAUSE_SHARE * (time.perf_counter() - began)
            self._pause = min(max(pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            for (_, reply, _), completion in zip(batch, completions, strict=True):
                if not reply.done():
                    reply.set_result(completion)

    async def _gather(self) -> None:
        """Wait for the requests that come at the same time."""
        if self._askers is not None:
            over = time.monotonic() + self._patience
            while self._asking() < self._askers() and time.monotonic() < over:
                await asyncio.sleep(_SHORTEST_PAUSE)
            return
        seen = 0
        while seen != len(self._waiting):
            seen = len(self._waiting)
            await asyncio.sleep(self._pause)

    def _asking(self) -> int:
        """How many askers wait."""
        return len({asker for _, reply, asker in self._waiting if not reply.done()})
