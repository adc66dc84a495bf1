"""A trial: episodes of random texts, each again in the same process, side by side and elsewhere,
and what the environment host uses meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.trial.plays import Difference, Played, difference, play, replay

EPISODES = 18
TURNS = 100
_SECONDS = 20.0


@dataclass(frozen=True)
class Trial:
    """Observations of an environment.

    deterministic, concurrent, wants_policy, characters: what the class says of itself. played: the
    first plays, one after the other. again, beside, elsewhere: the first difference of the same
    episodes played once more in the same process, all at once, and in a fresh process. growth: of
    what the process holds, for each episode; None where it was lost. in_turn, at_once: seconds of
    the second plays and of those side by side. computed: seconds of the processor in the latter.
    """

    deterministic: bool
    concurrent: bool
    wants_policy: bool
    characters: str
    turns: int
    played: list[Played]
    again: Difference | None
    beside: Difference | None
    elsewhere: Difference | None
    growth: Usage | None
    in_turn: float
    at_once: float
    computed: float

    @property
    def whole(self) -> list[Played]:
        """The episodes that did not fail."""
        return [each for each in self.played if each.failure is None]


async def try_out(
    environment: EnvironmentConfig, episodes: int = EPISODES, turns: int = TURNS
) -> Trial | None:
    """Play an environment; None for an agent, which needs a policy, once it was found.

    turns: after so many an episode is given up. Fewer episodes are played where they take long.
    Raises ConfigError when the environment cannot be made.
    """
    pool = await _started(environment, episodes)
    try:
        if environment.agent is not None:
            return None
        began, played = time.monotonic(), list[Played]()
        while len(played) < episodes and (len(played) < 2 or time.monotonic() - began < _SECONDS):
            played.append(await play(pool, len(played), turns))
        whole = [each for each in played if each.failure is None]
        second, growth, in_turn = await _again(pool, whole)
        side, at_once, computed = await _at_once(pool, whole)
    finally:
        await pool.stop()
    other = await _started(environment, 1)
    try:
        third = [await replay(other, number, each) for number, each in enumerate(whole)]
    finally:
        await other.stop()
    return Trial(
        deterministic=pool.deterministic,
        concurrent=pool.concurrent,
        wants_policy=pool.wants_policy,
        characters=pool.characters,
        turns=turns,
        played=played,
        again=_first(whole, second),
        beside=_first(whole, side),
        elsewhere=_first(whole, third),
        growth=growth,
        in_turn=in_turn,
        at_once=at_once,
        computed=computed,
    )


async def _started(environment: EnvironmentConfig, concurrency: int) -> EnvironmentPool:
    pool = EnvironmentPool.of(environment, hosts=1, concurrency=concurrency, log_path=None)
    await pool.start()
    return pool


async def _again(
    pool: EnvironmentPool, whole: Sequence[Played]
) -> tuple[list[Played], Usage | None, float]:
    """The same episodes one after the other, what each has left behind, and the seconds."""
    if not whole or not pool.host_pids:
        return [], None, 0.0
    (pid,) = pool.host_pids
    second, growth, seconds = list[Played](), list[Usage](), 0.0
    before, half = await settled_usage(pid), (len(whole) + 1) // 2
    for part in filter(None, (whole[:half], whole[half:])):
        began = time.monotonic()
        second += [
            await replay(pool, number, each) for number, each in enumerate(part, len(second))
        ]
        seconds += time.monotonic() - began
        if pool.host_pids != [pid]:
            return second, None, seconds
        after = await settled_usage(pid)
        growth.append(after.growth(before, len(part)))
        before = after
    # A leak is in both halves; the host's own threads begin once, when one more is wanted.
    return second, Usage(*map(min, zip(*growth, strict=True))), seconds


async def _at_once(
    pool: EnvironmentPool, whole: Sequence[Played]
) -> tuple[list[Played], float, float]:
    """The same episodes side by side, the seconds, and those of the processor."""
    if not whole or not pool.host_pids:
        return [], 0.0, 0.0
    (pid,) = pool.host_pids
    used, began = processor_seconds(pid), time.monotonic()
    side = await asyncio.gather(*(replay(pool, n, each) for n, each in enumerate(whole)))
    seconds = time.monotonic() - began
    if pool.host_pids != [pid]:
        return side, seconds, 0.0
    return side, seconds, processor_seconds(pid) - used


def _first(whole: Sequence[Played], later: Sequence[Played]) -> Difference | None:
    pairs = zip(whole, later, strict=False)
    return next((found for pair in pairs if (found := difference(*pair)) is not None), None)


_POLL_SECONDS = 0.05
_POLLS = 20


class Usage(NamedTuple):
    """memory: resident bytes of the host. The others are counts; processes: its descendants."""

    memory: float
    threads: float
    files: float
    processes: float

    def growth(self, before: Usage, episodes: int) -> Usage:
        """Return the growth since then, for each of so many episodes."""
        pairs = zip(self, before, strict=True)
        return Usage(*((now - then) / episodes for now, then in pairs))


def usage(pid: int) -> Usage:
    """Measure the host now."""
    host = psutil.Process(pid)
    return Usage(
        host.memory_info().rss,
        host.num_threads(),
        host.num_fds(),
        len(host.children(recursive=True)),
    )


async def settled_usage(pid: int) -> Usage:
    """Measure the host once the environments that were closed have let go, or after a second."""
    now = usage(pid)
    for _ in range(_POLLS):
        before = now
        await asyncio.sleep(_POLL_SECONDS)
        now = usage(pid)
        if now[1:] == before[1:]:
            break
    return now


def processor_seconds(pid: int) -> float:
    """Add up the processor seconds that the host and its descendants have used so far."""
    host = psutil.Process(pid)
    times = [host.cpu_times(), *(child.cpu_times() for child in host.children(recursive=True))]
    return sum(each.user + each.system for each in times)
