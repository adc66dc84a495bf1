"""Plays episodes of the built-in agent loop whose environments ask the policy for their opponent.

Each episode has a session at a gateway that records nothing; where both sides are trained, the
opponent's conversations become samples of the episode, with rewards of their own. On a lockstep
engine the opponents' requests come while the loop waits for its environments: a batch waits until
all environments that still work have asked, so that it depends on the episodes alone and not on who
was faster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from earl_core.environments.base import (
    OPPONENT_REWARD,
    EnvironmentFailed,
    Message,
    StepResult,
)
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.rollout.agent_loop import live_slots, play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Engine
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.gateway import Gateway
from earl_core.rollout.gateway.play import all_unless
from earl_core.rollout.gateway.session import Session
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.trajectory.samples import OPPONENT_ROLE, Episode, EpisodeSpec, Sample

_PATIENCE_SHARE = 0.25
"""Share of a step's deadline: an environment that hangs does not cost those that wait with it
theirs."""


async def play_against_policy(
    engine: Engine,
    pool: EnvironmentPool,
    chat: ChatTokenizer,
    specs: Sequence[EpisodeSpec],
    settings: PlaySettings,
    *,
    meter: LoadMeter | None = None,
    slots: asyncio.Semaphore | None = None,
    both: bool = False,
) -> list[Episode]:
    """Play the episodes as `agent_loop.play` does, for a pool that `wants_policy`. both: whether
    both sides are trained."""
    meter = meter or LoadMeter(len(specs))
    slots = slots or live_slots(settings, len(specs))
    # Hosts of environments are on this host.
    settings = replace(settings, public=None)
    if engine.lockstep:
        # One that waits for a thread would never ask.
        live = min(settings.max_live_episodes or pool.threads, pool.threads)
        settings = replace(settings, max_live_episodes=live)
    table = _Table(pool, meter, {spec.episode_id: spec for spec in specs}, both)
    patience = _PATIENCE_SHARE * pool.step_timeout_seconds
    gateway = Gateway(
        engine, chat, settings, meter, askers=lambda: table.under_way, patience=patience
    )
    async with gateway:
        table.gateway = gateway
        playing = asyncio.create_task(
            play(engine, table, chat, specs, settings, meter=meter, slots=slots)
        )
        try:
            await all_unless(gateway.failed, [playing])
        finally:
            playing.cancel()
            await asyncio.wait({playing})
    episodes = playing.result()
    for episode in episodes:
        episode.opponent_versions = table.versions.get(episode.episode_id, [])
        samples = [] if episode.failed else table.samples.get(episode.episode_id, [])
        if episode.episode_id in table.paid:
            _join(episode, samples)
        else:
            meter.opponent_samples_unpaid += len(samples)
    return episodes


def _join(episode: Episode, samples: Sequence[Sample]) -> None:
    """Put the opponent's samples behind the episode's own. Each side's turns are in the order of
    their answers; those of the two are compared nowhere."""
    before = episode.turns
    for sample in samples:
        sample.role = OPPONENT_ROLE
        sample.turn_numbers = [before + number for number in sample.turn_numbers]
    episode.samples += samples


class _Table:
    """The pool, with a session at the gateway for each open episode."""

    gateway: Gateway

    def __init__(
        self,
        pool: EnvironmentPool,
        meter: LoadMeter,
        specs: Mapping[int, EpisodeSpec],
        both: bool,
    ) -> None:
        self._pool, self._meter, self._specs, self._both = pool, meter, specs, both
        self._sessions: dict[int, Session] = {}
        self.under_way = 0
        """Calls of environments under way."""
        self.versions: dict[int, list[int]] = {}
        """Policy versions that have answered the environments of episodes that are closed."""
        self.samples: dict[int, list[Sample]] = {}
        """Conversations of their opponents, where these are trained."""
        self.paid: set[int] = set()
        """Episodes whose environment has told a reward of the opponent. One that is cut on the
        policy's side may have told none, which is no reward of 0."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools of the pool."""
        return self._pool.tools

    async def reset(self, episode_id: int, prompt: int, seed: int) -> list[Message]:
        """An episode that is played anew gets another session, with the same draws."""
        await self._leave(episode_id)
        self.paid.discard(episode_id)
        session = self.gateway.open(self._specs[episode_id], trained=False)
        self._sessions[episode_id] = session
        async with self._call(episode_id):
            return await self._pool.reset(episode_id, prompt, seed, self.gateway.address(session))

    async def step(self, episode_id: int, text: str) -> StepResult:
        """Step in the pool; waits for the policy's answers are no time of the environment's own."""
        async with self._call(episode_id):
            return self._pay(episode_id, await self._pool.step(episode_id, text))

    async def use_tools(self, episode_id: int, message: Message) -> StepResult:
        """Use the tools of the pool; waits for the policy's answers count as in `step`."""
        async with self._call(episode_id):
            return self._pay(episode_id, await self._pool.use_tools(episode_id, message))

    def _pay(self, episode_id: int, result: StepResult) -> StepResult:
        """Give the opponent what the environment tells. Raises `EnvironmentFailed` where it told
        nothing to the end."""
        if not self._both:
            return result
        side = self._sessions[episode_id].opponent
        if OPPONENT_REWARD in result.info:
            self.paid.add(episode_id)
            side.pay(float(result.info[OPPONENT_REWARD]))
        if result.done and side.calls and episode_id not in self.paid:
            told = (
                "environment.train is `all`, and no step told the opponent's reward: put it into "
                'StepResult.info["opponent_reward"]'
            )
            raise EnvironmentFailed(episode_id, "invalid_result", told)
        return result

    async def close(self, episode_id: int) -> None:
        """Close the episode and its session; later requests of the environment are refused."""
        await self._leave(episode_id)
        await self._pool.close(episode_id)

    @asynccontextmanager
    async def _call(self, episode_id: int) -> AsyncIterator[None]:
        session = self._sessions[episode_id]
        before = session.waits.seconds
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._meter.environment_wait -= session.waits.seconds - before

    async def _leave(self, episode_id: int) -> None:
        session = self._sessions.pop(episode_id, None)
        if session is not None:
            self.versions[episode_id] = session.opponent_versions
            if self._both:
                self.samples[episode_id] = session.opponent.branches.samples
            session.abandon()
            await self.gateway.close(session)
