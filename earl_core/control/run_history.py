"""Observations of the run that the selector learns from, kept in its directory."""

from __future__ import annotations

import math
import threading

from earl_core.run import RunDirectory
from earl_core.selector.profile.observations import Observation


class RunHistory:
    """The run's observations: those of its file, and what is added. Any thread may add."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._seen = [Observation.model_validate(line) for line in run.observations.read()]
        self._inherited = len(self._seen)

    def add(self, seen: Observation) -> None:
        """Add an observation, which is on disk when this returns."""
        with self._lock:
            self._run.observations.append(seen.model_dump(mode="json"))
            self._seen.append(seen)

    def through(self, iteration: float = math.inf) -> list[Observation]:
        """List the observations up to and with this iteration, oldest first."""
        with self._lock:
            return [seen for seen in self._seen if seen.iteration <= iteration]

    def known_to(self, iteration: int, fresh: bool = False) -> list[Observation]:
        """List the observations that the choice of an iteration goes by, oldest first: its own, and
        those of the iterations that have ended when it begins. fresh: only those that this process
        added."""
        ended = iteration - 1 - self._run.config.schedule.staleness
        with self._lock:
            seen = self._seen[self._inherited if fresh else 0 :]
        return [each for each in seen if each.iteration == iteration or each.iteration <= ended]
