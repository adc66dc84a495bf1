"""Groups of episodes that are played side by side, begin when there is room and end when they end.

Each group is a play of the agent loop by itself. Between calls it lives in the event loop of its
worker; while the engine is away it is parked between two tokens. What was played is recorded, so
that a group goes on with another engine, in another process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from earl_core.rollout.engines.engine import Engine
from earl_core.rollout.engines.in_slices import EngineInSlices
from earl_core.rollout.engines.interruptible import InterruptibleEngine
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.errors import ContextOverflow, EngineLost
from earl_core.rollout.group_record import GroupRecord, NotRepeated
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.memory import OutOfMemory
from earl_core.trajectory.samples import Episode, EpisodeSpec

logger = logging.getLogger(__name__)

Play = Callable[..., Coroutine[Any, Any, list[Episode]]]
"""Plays `specs` on an `engine` with `settings`, a `meter` and a `record`."""

_HOLD_SECONDS = 1.0
"""For an engine to stop when it ends: whoever ends it does not wait for long."""

_ENDINGS = (EngineLost, OutOfMemory, ContextOverflow)
"""Of an engine, after which a group goes on with another one."""


class PlayedGroup(NamedTuple):
    """A group that has ended: its number in the run, its episodes, what they took."""

    group: int
    episodes: list[Episode]
    meter: LoadMeter


@dataclass(frozen=True)
class _Playing:
    specs: Sequence[EpisodeSpec]
    record: GroupRecord
    meter: LoadMeter
    task: asyncio.Task[list[Episode]]
    began: float

    @property
    def live(self) -> int:
        """Episodes that have not ended; those of a group that failed never will."""
        return 0 if self.task.done() else len(self.specs) - self.meter.episodes_done

    @property
    def has_begun(self) -> bool:
        """True where something was played, or asked for, that is recorded or not."""
        return self.record.has_begun or self.meter.running_max > 0

    @property
    def error(self) -> BaseException | None:
        """What has ended it, if it has failed."""
        ended = self.task.done() and not self.task.cancelled()
        return self.task.exception() if ended else None


class GroupPlayer:
    """limit_seconds: of a group, without the time in which it was parked. hold: gets the episodes
    for which no time passes outside of this process. `anew`: the groups that
    were begun again, because their environments have not repeated what is recorded or by
    `forget`; whoever tells of them clears it. All methods are of one event loop."""

    def __init__(
        self,
        engine: Engine,
        play: Play,
        settings: PlaySettings,
        limit_seconds: float,
        hold: Callable[[Collection[int]], None],
    ) -> None:
        self._engine = (
            EngineInSlices(engine, lambda: self.live)
            if engine.lockstep
            else InterruptibleEngine(engine)
        )
        self._play, self._limit, self._hold = play, limit_seconds, hold
        self._settings = replace(settings, clock=self._clock)
        self._playing: dict[int, _Playing] = {}
        self.anew: list[int] = []
        self._parked_since: float | None = None
        self._parked = 0.0

    @property
    def live(self) -> int:
        """Episodes that have not ended."""
        return sum(each.live for each in self._playing.values())

    @property
    def playing(self) -> list[int]:
        """The groups that are played, and those that have ended and were not taken, ascending."""
        return sorted(self._playing)

    @property
    def room(self) -> int:
        """How many further episodes may be in play."""
        return (self._settings.max_live_episodes or 0) - self.live

    def admit(
        self, group: int, specs: Sequence[EpisodeSpec], record: GroupRecord | None = None
    ) -> None:
        """Begin to play a group, or go on with what is recorded of it. Raises `ValueError` for one
        that is played already."""
        if group in self._playing:
            raise ValueError(f"group {group} is played already")
        meter = LoadMeter(len(specs))
        record = record or GroupRecord.of(spec.episode_id for spec in specs)
        play = self._play(
            engine=self._engine, specs=specs, settings=self._settings, meter=meter, record=record
        )
        task = asyncio.create_task(play)
        self._playing[group] = _Playing(specs, record, meter, task, self._clock())

    async def finished(self, seconds: float, slices: int | None = None) -> list[PlayedGroup]:
        """Go on, and return the groups that have ended, by their numbers; each once.

        seconds: how long to wait for one. slices: a lockstep engine runs so many, and none until
        the next call.
        Raises what ended a group, and `EngineLost` for one that takes too long.
        """
        self._take_up()
        tasks = [each.task for each in self._playing.values()]
        if slices is not None and isinstance(self._engine, EngineInSlices):
            await self._engine.advance(slices)
            # What has ended is closed, so that the next slice finds the environments alike.
            await _settled([each.task for each in self._playing.values() if not each.live])
        else:
            self._engine.go_on()
            if tasks:
                await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._begin_again()
        done = [group for group, each in sorted(self._playing.items()) if each.task.done()]
        found = [
            PlayedGroup(group, self._playing[group].task.result(), self._playing[group].meter)
            for group in done
        ]
        for group in done:
            del self._playing[group]
        if not found:
            # What has ended is taken first.
            self._check_limit()
        return found

    async def park(self) -> None:
        """Stop between two tokens, until `finished` is called again."""
        await self._engine.hold()
        if self._parked_since is None:
            self._parked_since = time.monotonic()
            episodes = (spec.episode_id for each in self._playing.values() for spec in each.specs)
            self._hold(list(episodes))

    async def forget(self, version: int) -> None:
        """Begin the groups again that hold tokens of a policy version, or of which that is not
        known. Only while they are parked."""
        held = [
            (group, each)
            for group, each in self._playing.items()
            if each.error is None
            and (version in each.record.versions() or not each.record.has_begun)
        ]
        for _, each in held:
            each.task.cancel()
        await asyncio.gather(*(each.task for _, each in held), return_exceptions=True)
        for group, each in held:
            logger.warning("group %d is played anew: version %d has other weights", group, version)
            del self._playing[group]
            self.admit(group, each.specs)
            self.anew.append(group)

    async def unfinished(self) -> dict[int, GroupRecord]:
        """Stop between two tokens for good: what was begun, with its record, which is empty where
        none is kept. `close` follows."""
        with suppress(Exception):
            # One that is lost has stopped, wherever that was.
            await asyncio.wait_for(self._engine.hold(), _HOLD_SECONDS)
        return {
            group: each.record
            for group, each in self._playing.items()
            if each.has_begun
            and not self._is_late(each)
            and (each.error is None or isinstance(each.error, _ENDINGS))
        }

    async def close(self) -> None:
        """End what is played, between two tokens."""
        playing, self._playing = list(self._playing.values()), {}
        try:
            await self._engine.abandon()
        finally:
            # Of an engine that is lost, too.
            for each in playing:
                each.task.cancel()
            await asyncio.gather(*(each.task for each in playing), return_exceptions=True)
            await self._engine.stop()
            self._take_up()

    def _begin_again(self) -> None:
        unlike = [g for g, each in self._playing.items() if isinstance(each.error, NotRepeated)]
        for group in unlike:
            logger.warning("group %d is played anew: %s", group, self._playing[group].error)
            self.admit(group, self._playing.pop(group).specs)
        self.anew += unlike

    def _take_up(self) -> None:
        if self._parked_since is not None:
            self._parked += time.monotonic() - self._parked_since
            self._parked_since = None
            self._hold(())

    def _clock(self) -> float:
        """Seconds that go on while nothing is parked."""
        now = time.monotonic() if self._parked_since is None else self._parked_since
        return now - self._parked

    def _is_late(self, playing: _Playing) -> bool:
        return self._clock() - playing.began > self._limit

    def _check_limit(self) -> None:
        late = [group for group, each in self._playing.items() if self._is_late(each)]
        if late:
            raise EngineLost(
                f"group {late[0]} is not finished after {self._limit:g} s: raise deadlines.stage, "
                "or look at its environment"
            )


async def _settled(tasks: Sequence[asyncio.Task[list[Episode]]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
