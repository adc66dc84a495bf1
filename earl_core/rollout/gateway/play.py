"""Plays episodes by agents of the user's own, which ask the gateway for the policy's answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from earl_core.environments.agent import POSTED
from earl_core.environments.base import EnvironmentFailed, StepResult
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.rollout.agent_loop import RETRIES, check_failures, live_slots
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Engine
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.gateway import Gateway
from earl_core.rollout.gateway.session import Session
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.trajectory.samples import Episode, EpisodeSpec

logger = logging.getLogger(__name__)


async def play_agents(
    engine: Engine,
    pool: EnvironmentPool,
    chat: ChatTokenizer,
    specs: Sequence[EpisodeSpec],
    settings: PlaySettings,
    *,
    meter: LoadMeter | None = None,
    slots: asyncio.Semaphore | None = None,
) -> list[Episode]:
    """Play the episodes as `agent_loop.play` does, with agents of the pool (`environments.agent`)
    instead of environments: their requests to the gateway make the episode, and they return its
    reward."""
    meter = meter or LoadMeter(len(specs))
    slots = slots or live_slots(settings, len(specs))
    episodes: dict[int, Episode] = {}

    async def one(gateway: Gateway, spec: EpisodeSpec) -> None:
        async with slots:
            episodes[spec.episode_id] = await _episode(gateway, pool, spec, meter, settings.clock)
        check_failures(list(episodes.values()), meter, settings, len(specs))
        meter.progressed()

    try:
        async with Gateway(engine, chat, settings, meter) as gateway:
            tasks = [asyncio.create_task(one(gateway, spec)) for spec in specs]
            try:
                await all_unless(gateway.failed, tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        meter.end()
    return [episodes[spec.episode_id] for spec in specs]


async def _episode(
    gateway: Gateway,
    pool: EnvironmentPool,
    spec: EpisodeSpec,
    meter: LoadMeter,
    clock: Callable[[], float],
) -> Episode:
    lost = 0
    while True:
        session = gateway.open(spec)
        try:
            return await _attempt(gateway, pool, session, meter, clock)
        except EnvironmentFailed as failure:
            if not failure.by_infrastructure or lost == RETRIES:
                timeout = failure.reason == "timeout"
                reason = "environment_timeout" if timeout else "environment_error"
                return session.fail(reason, str(failure))
            lost += 1
            session.abandon()
            meter.episodes_retried += 1
            logger.warning("episode %d is retried: %s", spec.episode_id, failure.reason)
        finally:
            await gateway.close(session)
            with contextlib.suppress(EnvironmentFailed):
                await pool.close(spec.episode_id)


async def _attempt(
    gateway: Gateway,
    pool: EnvironmentPool,
    session: Session,
    meter: LoadMeter,
    clock: Callable[[], float],
) -> Episode:
    spec, started = session.spec, clock()
    session.awaits_reward = pool.awaits_reward
    before = session.waits.seconds
    address = gateway.public_address(session)
    await pool.reset(spec.episode_id, spec.prompt_id, spec.environment_seed, address)
    try:
        result = await pool.step(spec.episode_id, "")
    finally:
        meter.environment_steps += 1
        seconds = clock() - started - (session.waits.seconds - before)
        meter.environment_wait += max(seconds, 0.0)
    return session.end(*_verdict(session, result))


def _verdict(session: Session, result: StepResult) -> tuple[float, dict[str, Any]]:
    """Reward and info: the agent's, or those that were posted. Raises `EnvironmentFailed` where
    they were to be posted and were not."""
    if not result.info.pop(POSTED, False):
        return result.reward, result.info
    if session.posted is None:
        told = "no reward was posted before its end"
        raise EnvironmentFailed(session.spec.episode_id, "exception", told)
    return session.posted["reward"], session.posted["info"]


async def all_unless(failed: asyncio.Future[None], tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all tasks; raises the first error of one, or what the gateway failed with."""
    waiting: set[asyncio.Future[Any]] = {failed, *tasks}
    while len(waiting) > 1:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        # What the engine raises is the cause of what agents then do.
        for each in sorted(done, key=lambda each: each is not failed):
            each.result()
    failed.cancel()
