"""The environment pools of a rollout worker, and episodes of several environments on one engine."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.base import StepResult
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.trial import plays
from earl_core.experience.probe import Asked, Probed, ProbedEpisode, reply_difference
from earl_core.guard.seen import environment_source
from earl_core.rollout.agent_loop import live_slots, play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Engine
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.opponents import play_against_policy
from earl_core.rollout.gateway.play import play_agents
from earl_core.rollout.group_record import GroupRecord
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.secrets import redact
from earl_core.system.files import write_atomic
from earl_core.trajectory.samples import Episode, EpisodeSpec, utf8

_PARKED = "parked "


class EnvironmentPools:
    """A pool for each environment and options that were played; `close` ends their processes.

    log: beside it the hosts write theirs. record: gets the versions of foreign Pythons' packages.
    here: as for `EnvironmentPool`.
    """

    def __init__(self, log: Path, record: Path, here: bool = False) -> None:
        self._here = here
        self._log, self._record = log, record
        self._pools: dict[str, EnvironmentPool] = {}
        self._versions: dict[str, Any] = {}
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._held: Collection[int] = ()

    async def play(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        environments: Mapping[str, EnvironmentConfig],
        specs: Sequence[EpisodeSpec],
        settings: PlaySettings,
        meter: LoadMeter,
        record: GroupRecord | None = None,
    ) -> list[Episode]:
        """`agent_loop.play` for specs of several environments, by their labels. record: as there;
        agents and environments that ask the policy have none.

        Side by side where the engine batches by itself, else one environment after the other, so
        that equal inputs give equal episodes.
        """
        settings = replace(settings, episodes=settings.episodes or len(specs))
        slots = live_slots(settings, len(specs))
        parts: dict[str, list[EpisodeSpec]] = {}
        for spec in specs:
            parts.setdefault(spec.environment, []).append(spec)

        async def of(label: str) -> list[Episode]:
            environment, own = environments[label], parts[label]
            most = settings.max_live_episodes or len(own)
            pool = await self._pool(environment, most, parked=record is not None)
            player: Callable[..., Coroutine[Any, Any, list[Episode]]] = partial(play, record=record)
            if environment.agent:
                player = play_agents
            elif pool.wants_policy:
                player = partial(play_against_policy, both=environment.train == "all")
            timed = replace(
                settings,
                call_seconds=environment.call_timeout_seconds,
                episode_seconds=environment.episode_timeout_seconds,
            )
            return await player(engine, pool, chat, own, timed, meter=meter, slots=slots)

        if engine.lockstep:
            played = [await of(label) for label in parts]
        else:
            played = await _all(*map(of, parts))
        found = {episode.episode_id: episode for each in played for episode in each}
        return [found[spec.episode_id] for spec in specs]

    async def start(self, environment: EnvironmentConfig, concurrency: int) -> None:
        """Start the environment's pool, if that was not done. concurrency: how many episodes it
        plays at a time. Raises what the pool does."""
        await self._pool(environment, concurrency)

    def hold(self, episodes: Collection[int]) -> None:
        """Let no time pass for these episodes, and for all others, as `EnvironmentPool.hold`."""
        self._held = episodes
        for pool in self._pools.values():
            pool.hold(episodes)

    def can_replay(self, environment: EnvironmentConfig) -> bool:
        """Tell whether episodes that were played here can be played again from their answers."""
        pool = self._pools.get(_key(environment))
        asks = environment.agent is not None or (pool is not None and pool.wants_policy)
        said = environment.deterministic and (pool is None or pool.deterministic)
        return said and not asks

    async def replay(
        self,
        environments: Mapping[str, EnvironmentConfig],
        probed: Probed,
        at_once: int | None = None,
    ) -> Asked:
        """Give recorded answers to the environments that are played here and can be replayed, and
        compare what they reply. What fails says nothing. at_once: episodes that an environment
        stands at a time; None: as many as are asked for."""
        found = Asked.about(probed)
        for label, environment in environments.items():
            source, pool = environment_source(label), self._pools.get(_key(environment))
            # Tools are asked by another way.
            if pool is None or not self.can_replay(environment) or pool.tools:
                continue
            asked = probed.episodes.get(source, ())
            own = [e for e in asked if e.episode["environment"] == label]
            if own:
                slots = asyncio.Semaphore(at_once or len(own))
                with found.asking(source, len(own)):
                    await self._replay(pool, source, own, found, slots)
        return found

    async def _replay(
        self,
        pool: EnvironmentPool,
        source: str,
        probed: Sequence[ProbedEpisode],
        found: Asked,
        slots: asyncio.Semaphore,
    ) -> None:
        async def replayed_in_turn(number: int, before: plays.Played) -> plays.Played:
            async with slots:
                return await plays.replay(pool, number, before)

        recorded = (
            plays.Played(each.episode["prompt_id"], each.seed, texts=each.answers)
            for each in probed
        )
        # Numbers that no episode has.
        numbers = range(-1, -1 - len(probed), -1)
        replayed = await asyncio.gather(*map(replayed_in_turn, numbers, recorded))
        for each, after in zip(probed, replayed, strict=True):
            replies = [r.messages if isinstance(r, StepResult) else r for r in after.replies]
            said = [redact(utf8("\n".join(m["content"] for m in shown))) for shown in replies]
            if after.failure is None:
                told = reply_difference(each, said, [result.reward for result in after.results])
                found.add(source, each.episode["episode_id"], told)

    async def close(self) -> None:
        """End all hosts."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            await pool.stop()

    async def _pool(
        self, environment: EnvironmentConfig, concurrency: int, parked: bool = False
    ) -> EnvironmentPool:
        """parked: calls that ask the policy may stand for long, and would keep threads, or the
        turn, from what is played meanwhile: they have a pool of their own."""
        key = _key(environment)
        if not (parked and environment.agent):
            pool = await self._of(key, environment, concurrency)
            if not (parked and pool.wants_policy):
                return pool
        return await self._of(_PARKED + key, environment, concurrency)

    async def _of(
        self, key: str, environment: EnvironmentConfig, concurrency: int
    ) -> EnvironmentPool:
        async with self._starting[key]:
            return self._pools.get(key) or await self._started(key, environment, concurrency)

    async def _started(
        self, key: str, environment: EnvironmentConfig, concurrency: int
    ) -> EnvironmentPool:
        pool = EnvironmentPool.of(
            environment,
            concurrency=concurrency,
            here=self._here,
            log_path=self._log.with_name(f"{self._log.stem}-environments-{len(self._pools)}.log"),
        )
        self._pools[key] = pool
        # The engine may be away since before there was this pool.
        pool.hold(self._held)
        try:
            await pool.start()
        except BaseException:
            del self._pools[key]
            raise
        if environment.python is not None:
            self._versions[environment.played] = {
                "interpreter": environment.python,
                **pool.versions,
            }
            write_atomic(self._record, json.dumps(self._versions, indent=1).encode())
        return pool


def _key(environment: EnvironmentConfig) -> str:
    """What tells pools apart; whoever is trained is the same to an environment."""
    return environment.model_dump_json(exclude={"train"})


async def _all(*plays: Coroutine[Any, Any, list[Episode]]) -> list[list[Episode]]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in plays]
    except BaseExceptionGroup as errors:
        # The others were cancelled for it.
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
