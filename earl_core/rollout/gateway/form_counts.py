"""Counts how many answers of a session have the form that was asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from earl_core.environments.base import Message
from earl_core.rollout.gateway.constraints import Constraint
from earl_core.rollout.rollout_load import LoadMeter

logger = logging.getLogger(__name__)

_COUNTING_SECONDS = 10.0


class FormCounts:
    """Comparisons of answers with what was asked for, beside the session."""

    def __init__(self, episode_id: int, meter: LoadMeter) -> None:
        self._episode_id, self._meter = episode_id, meter
        self._counting: set[asyncio.Task[None]] = set()

    def note(self, constraints: Sequence[Constraint], message: Message) -> None:
        """Count whether an answer has the form that was asked for."""
        if not constraints:
            return

        async def count() -> None:
            fits = [await each.satisfied(message) for each in constraints]
            self._meter.constrained_satisfied += all(fits)

        self._meter.constrained_calls += 1
        # Nobody waits for it but the end of the session: the answer is recorded.
        counting = asyncio.create_task(count())
        self._counting.add(counting)
        counting.add_done_callback(self._counting.discard)

    async def finished(self) -> None:
        """Wait until all forms of answers are counted. Those that take longer than ten seconds
        together are counted as others than were asked for."""
        late = set(self._counting)
        try:
            if late:
                _, late = await asyncio.wait(late, timeout=_COUNTING_SECONDS)
        finally:
            for each in late:
                each.cancel()
        if late:
            logger.warning(
                "%d answers of episode %d count as others than were asked for: comparing them with "
                "what was asked for takes too long",
                len(late), self._episode_id,
            )  # fmt: skip
