"""An engine that batches by itself, whose answers stop between any two tokens and go on, each as
another request, under the weights that the engine has then."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.engines.wrapped import WrappedEngine

_AGAIN_SECONDS = 1.0


class _Told:
    """What whoever asked was told of an answer as it grew. `request`: with which that is known."""

    def __init__(self, request: GenerationRequest) -> None:
        self._tell, self._count = request.on_tokens, len(request.sampled)
        self.request = request if self._tell is None else replace(request, on_tokens=self._next)

    def _next(self, tokens: Sequence[int]) -> None:
        assert self._tell is not None
        self._count += len(tokens)
        self._tell(tokens)

    def catch_up(self, answer: Completion) -> None:
        """Tell the end of a part, which the engine does not: the next part goes on after it."""
        if self._tell is not None and len(answer.tokens) > self._count:
            self._next(answer.tokens[self._count :])


class InterruptibleEngine(WrappedEngine):
    """An `Engine` over one that is not lockstep.

    While answers are stopped the engine has no request of them: it may be given other weights, be
    asked for other answers, and release its memory. It computes what stands before anew. The
    engine's grammars begin with the request: an answer of a form that has tokens is not stopped but
    waited for, and one that has none begins again.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._held = self._abandoned = False
        self._changed, self._idle = asyncio.Event(), asyncio.Event()
        self._asked: set[int] = set()
        self._running: set[int] = set()
        self._whole: set[int] = set()
        self._stopped: set[int] = set()
        self._cancelled: set[int] = set()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample all answers, each in as many requests as it takes."""
        return list(await asyncio.gather(*map(self._answer, requests)))

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        """End these requests, those that are stopped too."""
        self._cancelled |= self._asked.intersection(sequence_ids)
        self._tell()
        await self._engine.cancel(sequence_ids)

    async def hold(self) -> None:
        """Take all answers out of the engine, until `go_on`."""
        self._held = True
        while self._running:
            self._idle.clear()
            stopped = self._running - (set() if self._abandoned else self._whole)
            self._stopped |= stopped
            await self._engine.cancel(list(stopped))
            # One that was on its way into the engine is asked again.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _AGAIN_SECONDS)

    async def abandon(self) -> None:
        """Take all answers out of the engine for good, and wait for none."""
        self._abandoned = True
        await self.hold()

    def go_on(self) -> None:
        """Undo `hold`."""
        self._held = False
        self._tell()

    async def stop(self) -> None:
        """Do nothing: whoever asked has been cancelled."""

    async def _answer(self, request: GenerationRequest) -> Completion:
        sequence, told = request.sequence_id, _Told(request)
        own, request = request, told.request
        if own.form is not None:
            request = replace(own, on_tokens=partial(self._begun, own))
        self._asked.add(sequence)
        try:
            while True:
                while self._held and sequence not in self._cancelled:
                    await self._changed.wait()
                if sequence in self._cancelled:
                    return request.ended("cancelled", self.policy_version or 0)
                answer = await self._part(request)
                if answer.finish_reason != "cancelled" or sequence not in self._stopped:
                    return answer
                self._stopped.discard(sequence)
                if own.form is None:
                    told.catch_up(answer)
                    request = request.after(answer)
        finally:
            for each in (self._asked, self._stopped, self._cancelled):
                each.discard(sequence)

    async def _part(self, request: GenerationRequest) -> Completion:
        self._running.add(request.sequence_id)
        try:
            (answer,) = await self._engine.generate([request])
            return answer
        finally:
            self._running.discard(request.sequence_id)
            self._whole.discard(request.sequence_id)
            if not self._running:
                self._idle.set()

    def _begun(self, request: GenerationRequest, tokens: Sequence[int]) -> None:
        """An answer of a form has tokens; of one that is to begin again they are forgotten."""
        if request.sequence_id in self._stopped:
            return
        self._whole.add(request.sequence_id)
        if request.on_tokens is not None:
            request.on_tokens(tokens)

    def _tell(self) -> None:
        # Who waits now is woken; who waits later is not.
        self._changed.set()
        self._changed.clear()
