"""The part of a rollout worker that plays groups which go on under newer weights.

Its calls begin and collect work; episodes live in the worker between them. What is unfinished when
the engine ends, in whatever way but that of the process, is parked in the run directory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from earl_core.rollout.engine_factory import most_running
from earl_core.rollout.engine_worker import EngineWorker
from earl_core.rollout.environment_pools import EnvironmentPools
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.errors import EngineLost
from earl_core.rollout.group_player import GroupPlayer
from earl_core.rollout.group_record import GroupRecord
from earl_core.rollout.mixture import Draw
from earl_core.rollout.public_address import PublicAddress
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.rollout.rollout_stats import RolloutStats
from earl_core.run.parked_groups import ParkedGroup, ParkedGroups
from earl_core.run.run_stores import run_store
from earl_core.system import fault_points
from earl_core.system.memory import OutOfMemory, guarded, resident_peak_bytes
from earl_core.trajectory.samples import Episode, EpisodeSpec, derive_seed, rollout_rows
from earl_core.trajectory.schema import GROUP_SCHEMA, with_routing

logger = logging.getLogger(__name__)


class GroupWorker(EngineWorker):
    """An engine and environments, and the groups that are played with them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        log, here = self._context.log_path, self._context.here
        self._pools = EnvironmentPools(log, self._run_directory / "environments.json", here)
        self._groups: GroupPlayer | None = None
        self._parked = ParkedGroups(self._run_directory)
        # Of the groups that are played: the key of their settings, and their environment's label.
        self._given: dict[int, tuple[str, str]] = {}
        self._digests: dict[int, str] = {}

    def _settings(self, temperature: float | None, episodes: int | None = None) -> PlaySettings:
        rollout = self._config.rollout
        running = most_running(self._config, self._deployment)
        lockstep = self._engine is not None and self._engine.lockstep
        return PlaySettings(
            max_turns=rollout.max_turns,
            max_tokens_per_turn=rollout.max_tokens_per_turn,
            max_tokens_per_episode=rollout.max_tokens_per_episode,
            temperature=rollout.temperature if temperature is None else temperature,
            # Of those that a guard spares the whole rollout is judged.
            max_failed_share=max(rollout.max_failed_share, 0.5 * (self._config.guard == "act")),
            episodes=episodes,
            # While half wait for environments the engine is full, and the prefix cache holds all.
            max_live_episodes=running if lockstep else 2 * running,
            positions=self._positions,
            constrained=rollout.requests.constrained,
            grammars=self._grammars if rollout.requests.constrained == "engine" else None,
            public=PublicAddress.of(rollout.gateway),
        )

    def _specs(self, group: int, drawn: Draw, iteration: int) -> list[EpisodeSpec]:
        """The episodes of a group. iteration: the one that trains on them."""
        size, seed = self._config.rollout.group_size, self._seed(iteration)
        label, prompt = drawn
        return [
            EpisodeSpec(
                episode_id=episode,
                group_id=group,
                prompt_id=prompt,
                seed=derive_seed(seed, iteration, "rollout", episode),
                environment=label,
                batch=iteration,
            )
            for episode in range(group * size, (group + 1) * size)
        ]

    async def ensure(self, weights: dict[str, Any]) -> dict[str, Any]:
        """As without groups; those that are played stop between two tokens before, until they are
        asked for."""
        await self.park()
        found = await super().ensure(weights)
        await self._know({found["policy_version"]: found["digest"]})
        return found

    async def load(self, weights: dict[str, Any], anew: bool = False) -> dict[str, Any]:
        """Have groups be played, and go on, under these weights: as `ensure`, between two tokens.

        anew: end the groups that are played; what is left of them is parked. Returns what it
        returns, `room` as `admit` does, and `playing`: the groups that go on.
        """
        if anew:
            await self._forget_groups()
        found = await self.ensure(weights)
        if self._groups is None:
            engine, chat = self._ready()
            settings = replace(
                self._settings(self._config.rollout.temperature),
                # The batch's failures are judged when it is collected.
                max_failed_share=math.inf,
            )
            play = partial(self._pools.play, chat=chat, environments=self._config.played)
            limit = self._config.deadlines.stage
            self._groups = GroupPlayer(engine, play, settings, limit, self._pools.hold)
        return {**found, "room": self._groups.room, "playing": self._groups.playing}

    async def admit(self, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Begin to play groups, or go on with those that are parked. Returns at once, when the
        environments of the latter have started; raises why they have not. Call `load` first.

        groups: of each its number in the run (`group`), what it plays (`environment`, `prompt`),
        the `key` of its settings, and whether it is `parked`. Returns `room`, for how many further
        episodes there is some, and `resumed`, the groups that go on.
        """
        player, resumed = self._group_player(), []
        for each in groups:
            group, drawn = each["group"], (each["environment"], each["prompt"])
            specs = self._specs(group, drawn, self._batch_of(group))
            record = await self._parked_record(group, specs) if each["parked"] else None
            resumed += [group] if record is not None else []
            self._given[group] = each["key"], each["environment"]
            player.admit(group, specs, record)
        return {"room": player.room, "resumed": resumed}

    async def _parked_record(self, group: int, specs: Sequence[EpisodeSpec]) -> GroupRecord | None:
        """What is parked of a group, whose file is used up; None: it is to be played anew."""
        environment = self._config.played[specs[0].environment]
        most = self._settings(None).max_live_episodes or len(specs)
        # Where it cannot be started the file stays.
        await self._pools.start(environment, most)
        try:
            parked = self._parked.take(group)
            if parked is None or parked.episodes is None:
                raise ValueError("no episodes are parked")
            if not self._pools.can_replay(environment):
                raise ValueError("its environment cannot be replayed")
            record = GroupRecord.load(parked.episodes)
            if record.episodes != {spec.episode_id for spec in specs}:
                raise ValueError("other episodes are parked")
            if record.versions() != set(parked.versions):
                raise ValueError("other policy versions are named than have sampled its tokens")
        except Exception as error:
            logger.warning("group %d was parked and is played anew: %r", group, error)
            return None
        await self._know(parked.versions)
        return record

    async def _know(self, digests: Mapping[int, str]) -> None:
        """Take the digests of policy versions; groups that others have sampled are begun again."""
        for version, digest in digests.items():
            if self._groups is not None and self._digests.get(version, digest) != digest:
                await self._groups.forget(version)
            self._digests[version] = digest

    async def finished(self, seconds: float, slices: int | None = None) -> dict[str, Any]:
        """Play on, and seal the groups that have ended, each by itself.

        seconds: how long to wait for one, at most. slices: how many the engine runs, and none
        between these calls; None: it goes on by itself. Returns `groups`, for each its `group`,
        `shards`, `tally` and `versions`, `room`, and `anew`: the groups that were begun again,
        because what was recorded of them did not hold. Raises what ended a group, and `EngineLost`
        for one that took longer than `deadlines.stage`, the time in which it stood still not
        counted; the others are parked then.
        """
        player = self._group_player()
        try:
            done = await player.finished(seconds, slices)
        except BaseException as error:
            if isinstance(error, EngineLost | OutOfMemory):
                await self._drop_engine()
            await self._forget_groups()
            raise
        for each in done:
            self._given.pop(each.group, None)
        with guarded("rollout", "writing the samples"):
            sealed = [self._sealed(group, episodes, meter) for group, episodes, meter in done]
        anew, player.anew = player.anew, []
        return {"groups": sealed, "room": player.room, "anew": anew}

    async def park(self) -> dict[str, Any]:
        """Stop between two tokens; unfinished groups go on after the next `load`."""
        if self._groups is not None:
            await self._groups.park()
        return {}

    def _sealed(self, group: int, episodes: Sequence[Episode], meter: LoadMeter) -> dict[str, Any]:
        batch, played = self._batch_of(group), [each for each in episodes if not each.failed]
        meter.peak_memory_bytes = resident_peak_bytes(self._processes())
        fault_points.point(f"group.played{group}", batch)
        routing = self._ready()[0].routing
        shards, versions = [], {v for e in played for s in e.samples for v in s.token_versions}
        # What the opponent has said depends on weights as much.
        versions |= {v for e in played for v in e.opponent_versions}
        if played:
            entry = run_store(self._run_directory, self._config).publish(
                stage="collect",
                iteration=batch,
                rank=group,
                schema=with_routing(GROUP_SCHEMA, routing),
                rows=rollout_rows(played, GROUP_SCHEMA, routing),
            )
            shards.append(entry.model_dump(mode="json"))
        fault_points.point(f"group.sealed{group}", batch)
        return {
            "group": group,
            "shards": shards,
            "tally": RolloutStats.of(episodes, meter).model_dump(mode="json"),
            "versions": sorted(versions - {-1}),
        }

    def _batch_of(self, group: int) -> int:
        return group // self._config.rollout.prompts_per_iteration

    def _group_player(self) -> GroupPlayer:
        if self._groups is None:
            raise EngineLost("the engine was ended, and with it what it played: call `load` first")
        return self._groups

    async def _forget_groups(self) -> None:
        """End what is played, and park what can go on with another engine."""
        groups, self._groups = self._groups, None
        if groups is None:
            return
        try:
            left = await groups.unfinished()
            written = sum(self._write_parked(group, record) for group, record in left.items())
            if groups.playing:
                logger.info("%d of %d groups are parked", written, len(groups.playing))
        finally:
            await groups.close()

    def _write_parked(self, group: int, record: GroupRecord) -> bool:
        """Write a group down; False where nothing of it is recorded that should be, or that
        fails: it is played anew."""
        try:
            versions = {version: self._digests[version] for version in record.versions()}
            key, label = self._given[group]
            # A record has no experts: what has ended of a mixture's group would lose its own.
            routed = self._engine is not None and self._engine.routing is not None
            kept = self._pools.can_replay(self._config.played[label]) and not routed
            if kept and not record.has_begun:
                return False
            episodes = record.dump() if kept else None
            self._parked.write(
                ParkedGroup(group=group, key=key, versions=versions, episodes=episodes)
            )
        except Exception as error:
            logger.warning("group %d is not parked: %r", group, error)
            return False
        return True

    async def _drop_engine(self) -> None:
        try:
            await self._forget_groups()
        finally:
            await super()._drop_engine()
