"""Observations of a run that the selector learns from, kept in its directory; the update of the
shared profile by them, for the runs to come."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path

from earl_core.deployment.shapes import Hardware
from earl_core.run import RunDirectory
from earl_core.selector.profile.observations import INFEASIBLE, Observation, refined
from earl_core.selector.profile.profile_table import (
    ProfileError,
    ProfileTable,
    only_writer,
    read_table,
    write_table,
)
from earl_core.system.errors import InUse

logger = logging.getLogger(__name__)


class LearntProfile:
    """The shared table of a fingerprint with what this run has measured since it was read.

    The run's record counts how many of its observations are in the shared table already, so that
    none is counted twice after a resume. divided: training may have a part of the devices.
    """

    def __init__(
        self,
        run: RunDirectory,
        directory: Path,
        mark: str,
        table: ProfileTable,
        half_life: float,
        divided: bool = False,
    ) -> None:
        self._run, self._directory, self._mark = run, directory, mark
        self._half_life, self._divided = half_life, divided
        self._table, self._counted = table, self._shared
        self._warned = self._bounded = False
        self._taken: tuple[list[Observation], ProfileTable] = [], table

    @property
    def _shared(self) -> int:
        """Observations of this run that are in the shared table."""
        known: dict[str, int] = self._run.record.get("profiled", {})
        return known.get(self._mark, 0)

    def table(
        self,
        observations: list[Observation],
        hardware: Hardware,
        known: list[Observation] | None = None,
    ) -> ProfileTable:
        """Return the table with all of the run's observations. known: with those of them only, now
        and from then on, where iterations overlap."""
        fresh = observations[self._counted :]
        if known is not None:
            self._bounded = True
            held = {id(seen) for seen in known}
            return self._with([seen for seen in fresh if id(seen) in held], hardware)
        if fresh:
            self._table = refined(self._table, fresh, self._half_life, hardware, self._divided)
            self._counted = len(observations)
        return self._table

    def _with(self, fresh: list[Observation], hardware: Hardware) -> ProfileTable:
        """The table as it was read with these; what was added last time is not added again."""
        fresh = sorted(fresh, key=lambda seen: seen.iteration)
        taken, table = self._taken
        if not taken or fresh[: len(taken)] != taken:
            taken, table = [], self._table
        if more := fresh[len(taken) :]:
            table = refined(table, more, self._half_life, hardware, self._divided)
        self._taken = fresh, table
        return table

    def share(self, observations: list[Observation], hardware: Hardware) -> None:
        """Write what the run measured into the shared table, for the runs to come.

        Never that it ran out of memory: that may have been another program's doing. A table that
        cannot be written, in a directory that is read-only or full, or that was damaged meanwhile,
        is left alone with a warning: the run goes on by what it measured itself.
        """
        fresh = observations[self._shared :]
        if not any(seen.kind == "measured" for seen in fresh):
            return
        try:
            with only_writer(self._directory, self._mark):
                table = read_table(self._directory, self._mark)
                table = refined(table, fresh, self._half_life, hardware, self._divided)
                write_table(self._directory, self._mark, table)
        except InUse:
            # `earl profile` writes it for long: the next iteration will do.
            return
        except (OSError, ProfileError) as error:
            self._warn(error)
            return
        known = self._run.record.get("profiled", {})
        self._run.update_record(profiled={**known, self._mark: len(observations)})
        if not self._bounded:
            self._table, self._counted = table, len(observations)

    def _warn(self, error: Exception) -> None:
        """Once: what stands in the way now will most likely do so in each iteration."""
        if not self._warned:
            logger.warning("what this run measures is not shared with others: %s", error)
        self._warned = True


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
        """List the observations that the choice of an iteration goes by, oldest first: its own,
        those of the iterations that have ended when it begins, and what did not fit in one between
        them that divided the devices anew. fresh: only those that this process added."""
        ended = iteration - 1 - self._run.config.schedule.staleness
        anew = self.divided_anew(iteration)
        with self._lock:
            seen = self._seen[self._inherited if fresh else 0 :]
        return [
            each
            for each in seen
            if each.iteration <= ended
            or each.iteration == iteration
            or (each.iteration in anew and each.kind in INFEASIBLE)
        ]

    def divided_anew(self, iteration: int) -> dict[int, int]:
        """Return the iterations that this one runs ahead of which divided the devices anew, and the
        attempt of each at which it last did."""
        first = max(0, iteration - self._run.config.schedule.staleness)
        plans = {each: self._run.plan(each) for each in range(first, iteration)}
        return {k: plan.divided_anew for k, plan in plans.items() if plan and plan.divided_anew}
