"""Measuring the profile: a Prefect task for each point."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from prefect import task

from earl_core.cluster.errors import WorkerError
from earl_core.config import ConfigError, RunConfig
from earl_core.control.ancestor import beginning
from earl_core.control.device_figures import with_cores, with_figures
from earl_core.control.failure_diagnosis import diagnose
from earl_core.control.hardware import read_hardware
from earl_core.control.live import find, live
from earl_core.control.machine_profile import profile_of
from earl_core.control.precision import resolved
from earl_core.control.profile_workers import ProfileWorkers
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import SELECTABLE
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.profile_table import (
    ProfileError,
    ProfilePoint,
    key_of,
    only_writer,
    read_table,
    write_table,
)
from earl_core.selector.profile_planner import START_SECONDS, PlaceKey, Point, grid_of, next_point
from earl_core.system.errors import Cancelled, InUse
from earl_core.system.memory import memory_in_use

logger = logging.getLogger(__name__)

_WEIGHT = 4.0
"""Weight of a measured point beside one observation of a run: it is made of passes that nothing
disturbed, and a single iteration's noise must not turn a choice."""

_FAILURES = 3
"""So many points in a row that fail for another reason than memory end the profile."""


class Profiler:
    """One profile in the making. Made by `open_profiler`.

    The table is written after each point, with the seconds spent so far, so that another start
    goes on from there. It reads no run and locks none. `prepare` comes first; `interrupt` may be
    called from any thread.
    """

    def __init__(self, config: RunConfig, minutes: float) -> None:
        precision = resolved(config)
        precision.tell(logger.info)
        self.config = config = beginning(precision.config)
        self.budget = 60 * minutes
        hardware = with_figures(read_hardware(), directory=config.selector.profile_directory)
        self.hardware = with_cores(hardware)
        self.failures: list[str] = []
        self.measured = 0
        self._workers: ProfileWorkers | None = None
        self._stop_requested = False
        self._skipped: set[PlaceKey] = set()
        self._failed: list[WorkerError] = []

    def prepare(self, longest: int | None) -> None:
        """Make the model if it is missing, and read what was measured before. longest: context to
        measure, in tokens; None: the model's range. Raises `ConfigError`."""
        config = self.config
        self._prepare_model()
        model = read_model_shape(Path(config.initial_model.path))
        try:
            self.directory, self.mark, self.table = profile_of(config, self.hardware, model)
        except ProfileError as error:
            raise ConfigError(str(error)) from error
        if longest is not None and longest > model.max_positions:
            raise ConfigError(
                f"contexts of {longest} tokens were asked for, but the model's range ends at "
                f"{model.max_positions}: ask for less"
            )
        held = {} if self.hardware.gpus else dict.fromkeys(SELECTABLE, float(memory_in_use()))
        self.given = SelectionInput.of(config, self.hardware, model, reserved_bytes=held)
        try:
            self.grid = grid_of(self.given, longest)
            self.next()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _prepare_model(self) -> None:
        file = Path(self.config.initial_model.path) / "config.json"
        if not file.is_file() and self.config.model.maker is not None:
            self._workers = ProfileWorkers(self.config, self.hardware, 0)
            try:
                self._workers.build_model()
            finally:
                self.close(keep_logs=not file.is_file())

    @property
    def seconds_left(self) -> float:
        """Seconds left of the budget, which all starts of a profile share."""
        return max(0.0, self.budget - self.table.seconds)

    def next(self) -> Point | None:
        """The point to measure now; None when the profile is finished."""
        workers = self._workers
        started = workers.start_seconds if workers is not None else {}
        return next_point(
            self.given,
            self.grid,
            self.table,
            self.seconds_left,
            running=workers.running if workers is not None else None,
            costs=lambda stage: started.get(stage, START_SECONDS),
            skipped=self._skipped,
        )

    def measure(self, point: Point) -> ProfilePoint | None:
        """Measure a point and write the table; None when it failed for another reason than memory.

        Raises `Cancelled`, and the group's error once several points in a row, or the
        very first, have failed.
        """
        if self._stop_requested:
            raise Cancelled("the profile was asked to stop")
        if self._workers is None:
            self._workers = ProfileWorkers(self.config, self.hardware, self.grid.contexts[-1])
        began = time.monotonic()
        found: dict[str, Any] | None = None
        try:
            found = self._workers.measure(point)
        except WorkerError as error:
            infeasible = diagnose(error)
            if infeasible is not None and infeasible.kind == "out_of_memory":
                found = {"out_of_memory": True}
            else:
                self._note_failure(point, error)
        self.table = self.table.model_copy(
            update={"seconds": self.table.seconds + time.monotonic() - began}
        )
        measured = None
        if found is not None:
            self._failed.clear()
            self.measured += 1
            measured = ProfilePoint(
                key=key_of(point.candidate),
                context=point.context,
                requests=point.requests,
                weight=_WEIGHT,
                **found,
            )
            self.table = self.table.observe(measured, self.config.selector.half_life)
        write_table(self.directory, self.mark, self.table)
        return measured

    def _note_failure(self, point: Point, error: WorkerError) -> None:
        """Leave out this load of the candidate and all larger ones until the next start."""
        self._failed.append(error)
        if len(self._failed) >= _FAILURES or not self.measured:
            raise error
        logger.warning("%s was left out: %s", describe(point), error.reason)
        self.failures.append(f"{describe(point)}: {error.reason}")
        loads = {*self.grid.episodes, point.requests}
        for context in (c for c in self.grid.contexts if c >= point.context):
            for requests in (r for r in loads if r >= point.requests):
                larger = point._replace(context=context, requests=requests)
                self._skipped.add(larger.place)

    def interrupt(self) -> None:
        """End the workers, from any thread; what runs raises `Cancelled`."""
        self._stop_requested = True
        workers = self._workers
        if workers is not None:
            workers.stop()

    def close(self, keep_logs: bool = False) -> None:
        """End the workers. keep_logs: a failure's message may name them."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(keep_logs)


def describe(point: Point) -> str:
    """Describe a point, such as `rollout TP 1 x 2, 1,024 tokens x 16 sequences`."""
    what = "sequences" if point.candidate.stage == "rollout" else "samples"
    candidate = point.candidate._replace(max_running_requests=0)
    return (
        f"{candidate.stage} {candidate.label}, {point.context:,} tokens x {point.requests} {what}"
    )


@contextmanager
def open_profiler(config: RunConfig, minutes: float, longest: int | None) -> Iterator[Profiler]:
    """The profiler of a configuration, registered for `measure` under its fingerprint. Raises
    `ConfigError` for what cannot be measured, and while another process measures the same."""
    profiler = Profiler(config, minutes)
    with ExitStack() as held:
        held.enter_context(live(f"profile {id(profiler)}", profiler))
        profiler.prepare(longest)
        try:
            held.enter_context(only_writer(profiler.directory, profiler.mark))
        except InUse as busy:
            raise ConfigError(
                f"process {busy.holder} measures this profile already "
                f"({profiler.directory / profiler.mark}): wait for it, or stop it"
            ) from busy
        # What another process has measured until now.
        profiler.table = read_table(profiler.directory, profiler.mark)
        held.callback(profiler.close)
        held.enter_context(live(profiler.mark, profiler))
        try:
            yield profiler
        except WorkerError:
            profiler.close(keep_logs=True)
            raise


@task(name="measure", persist_result=False)
def measure(mark: str, point: dict[str, Any]) -> dict[str, Any] | None:
    """Measure one point; the new line of the table. See `Profiler.measure`."""
    wanted = Point(**{**point, "candidate": StageDeployment(**point["candidate"])})
    profiler = find(mark)
    assert isinstance(profiler, Profiler), f"no profile {mark} is open in this process"
    found = profiler.measure(wanted)
    return None if found is None else found.model_dump(mode="json")
