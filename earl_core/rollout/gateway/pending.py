"""An answer that is not there yet: its deadline, and the text that it surely begins with."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.call import Answer
from earl_core.rollout.gateway.refusals import refused
from earl_core.rollout.rollout_load import LoadMeter

_LOOK_SECONDS = 0.05
"""Between two looks at a clock that may stand still."""


class PendingAnswer:
    """It may take `settings.call_seconds` by the settings' clock."""

    def __init__(
        self,
        answering: Coroutine[Any, Any, list[Answer]],
        settings: PlaySettings,
        meter: LoadMeter,
    ) -> None:
        self._task = asyncio.ensure_future(answering)
        self._limit, self._clock, self._meter = settings.call_seconds, settings.clock, meter
        self._began = settings.clock()

    async def wait(
        self, seconds: float | None, *others: asyncio.Future[None]
    ) -> Sequence[Answer] | None:
        """The answers; None after so many seconds, or when one of the others is done, before it.

        Raises what the answering raises, and `HTTPException` when its time is over.
        """
        left = None
        if self._limit is not None:
            left = max(self._began + self._limit - self._clock(), _LOOK_SECONDS)
        waiting: set[asyncio.Future[Any]] = {self._task, *others}
        await asyncio.wait(
            waiting,
            timeout=min((each for each in (seconds, left) if each is not None), default=None),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._task.done():
            return self._task.result()
        if self._limit is not None and self._clock() >= self._began + self._limit:
            self._meter.calls_timed_out += 1
            told = f"the answer took over {self._limit:g} s (environment.call_timeout_seconds)"
            # Not 408 or 504, after which clients ask again.
            raise refused(400, "call_timeout", told)
        return None

    async def give_up(self) -> None:
        """The request has not been, unless the answer is there."""
        self._task.cancel()
        await asyncio.wait({self._task})


class Growth:
    """The tokens that the engine has sampled of an answer so far. held: characters at the end of
    the text that its end may still cut off."""

    def __init__(self, chat: ChatTokenizer, held: int = 0) -> None:
        self._chat, self._held = chat, held
        self._tokens: list[int] = []
        self.sent = ""
        """All pieces so far."""

    @property
    def begun(self) -> bool:
        """True when the answer has tokens."""
        return bool(self._tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next ones."""
        self._tokens += tokens

    def piece(self) -> str:
        """Return the known part of the answer's text beyond the pieces so far."""
        text = self._chat.beginning_of(self._tokens)
        text = text[: max(len(text) - self._held, 0)]
        piece = text[len(self.sent) :]
        self.sent += piece
        return piece
