"""Iterations that run side by side, and what each stage of them waits for.

With `schedule.staleness` s an iteration may begin once iteration k - 1 - s has ended; its rollout
follows that of iteration k - 1 on each engine, its training follows the publication of iteration
k - 1. `train` begins the iterations in order, each as a flow run of its own.

| of iteration k | begins when |
|---|---|
| select | iteration k - 1 - s has ended, and iteration k - 1 has a plan |
| rollout | an engine has nothing more to play of rollout k - 1 |
| reward, advantage | their inputs are sealed |
| reference, update | iteration k - 1 is published |
| publish | iteration k - 1 has ended |
| the end: metrics, STABLE, release of shards | iteration k - 1 has ended |

Rollout k - 1 is sealed first where the prompts follow from its seal (mixtures, waves of prompts),
where the version to play is to be evaluated, and where engines change. All of iteration k - 1 has
ended first where devices change sides, or where rollout and update take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from earl_core.control.engine_turns import LeftAhead
from earl_core.deployment.stages import ROLES, ROWS, Stage
from flows.running import log

BEGUN, PLACED, LEFT, PLAYED, END = "begun", "devices", "left", "rollout", "end"
"""Points of an iteration: its flow run runs; its plan's devices are on their sides; an engine has
nothing more to play for it; none works for it any more; all of it is done."""


class Overlap:
    """The points that the iterations of one `train` have passed. All of it is on one event loop.

    staleness: the run's, at least 1. first: the iteration that it begins with; those before have
    ended. apart: tells whether no engine may begin an iteration's rollout before all have ended the
    one before. evaluate: evaluates the version that an iteration's rollout plays, if that is due
    before it.
    """

    def __init__(
        self,
        staleness: int,
        first: int,
        apart: Callable[[int], bool],
        evaluate: Callable[[int], Awaitable[object]],
    ) -> None:
        self._staleness, self._first = staleness, first
        self._apart, self._evaluate = apart, evaluate
        self._passed: set[tuple[int, str]] = set()
        self._stopped = ""
        self._changed = asyncio.Condition()

    async def before(self, iteration: int, stage: Stage) -> None:
        """Wait until the iteration's stage may begin. Raises `LeftAhead` once `stop` was called."""
        if self._stopped:
            raise LeftAhead(self._stopped)
        if stage.makes == "plan":
            await self._reached(iteration - 1 - self._staleness, END)
            await self._reached(iteration - 1, stage.name)
        elif stage.role == "rollout" or stage.name in ROWS:
            apart = await asyncio.to_thread(self._apart, iteration)
            await self._reached(iteration - 1, PLAYED if apart else LEFT)
            await self._evaluate(iteration)
        elif ROLES[stage.role].placed:
            await self._reached(iteration - 1, "publish")
            if stage.makes == "weights":
                # Which deletes older ones, and the end of that iteration saves some.
                await self._reached(iteration - 1, END)

    async def before_devices(self, iteration: int, barrier: bool) -> None:
        """Wait until the iteration may have its devices. barrier: only once the one before has
        ended."""
        await self._reached(iteration - 1, END if barrier else PLACED)

    async def before_end(self, iteration: int) -> None:
        """Wait until the iteration may be finished."""
        await self._reached(iteration - 1, END)

    async def begun(self, iteration: int) -> None:
        """Wait until the iteration's flow run runs."""
        await self._reached(iteration, BEGUN)

    async def passed(self, iteration: int, point: Stage | str) -> None:
        """The iteration's stage is sealed, or its flow run has begun (`BEGUN`) or ended (`END`)."""
        if isinstance(point, Stage):
            # An iteration that imitates leaves the engines to the next one.
            point = PLAYED if point.name in ROWS else point.name
        async with self._changed:
            self._passed.add((iteration, point))
            if point == PLAYED:
                # One that was sealed before.
                self._passed.add((iteration, LEFT))
            self._changed.notify_all()

    async def stop(self, why: str) -> None:
        """Have all that waits end with `LeftAhead`, now and later."""
        async with self._changed:
            self._stopped = why
            self._changed.notify_all()

    async def _reached(self, iteration: int, point: str) -> None:
        if iteration < self._first:
            return
        async with self._changed:
            if point != BEGUN and (iteration, point) not in self._passed and not self._stopped:
                log(f"waits for iteration {iteration}: {point}")
            await self._changed.wait_for(
                lambda: (iteration, point) in self._passed or self._stopped
            )
        if (iteration, point) not in self._passed:
            raise LeftAhead(self._stopped)


_open: dict[str, Overlap] = {}


@contextmanager
def overlapping(run: Path, overlap: Overlap) -> Iterator[None]:
    """Have the iterations of the run find it until the block ends."""
    name = str(run.resolve())
    _open[name] = overlap
    try:
        yield
    finally:
        del _open[name]


def overlap_of(run: Path) -> Overlap | None:
    """Find what iterations of the run wait for; None where they run one after another."""
    return _open.get(str(run.resolve()))
