"""A rollout's progress, from its load meter to the controller."""

from __future__ import annotations

import time

from earl_core.cluster.context import WorkerContext
from earl_core.rollout.load_meter import LoadMeter

_PROGRESS_SECONDS = 0.3


class ProgressReport:
    """Sends the meter's state to the controller, a few times a second at most."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._due = 0.0

    def __call__(self, meter: LoadMeter, last: bool = False) -> None:
        now = time.perf_counter()
        if now < self._due and not last:
            return
        self._due = now + _PROGRESS_SECONDS
        played = meter.episodes_done - meter.episodes_failed
        self._context.report(
            {
                "episodes_done": meter.episodes_done,
                "episodes": meter.episodes,
                "tokens_per_second": meter.tokens_per_second,
                "return": meter.reward_total / max(played, 1),
            }
        )
