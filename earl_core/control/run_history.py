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

    def since_start(self, iteration: int) -> list[Observation]:
        """List those observations of `through` that this process added."""
        with self._lock:
            fresh = self._seen[self._inherited :]
        return [seen for seen in fresh if seen.iteration <= iteration]
