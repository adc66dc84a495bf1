"""The agent loop: plays many episodes against one engine and one pool of environments.

Each episode is an `EpisodePlayer`; one of two schedules moves it on. Lockstep, for engines that
want whole batches: each turn, the requests of all live episodes go to the engine at once, then all
environments step; equal inputs give equal episodes. Continuous, for engines that batch by
themselves: a coroutine for each episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import Answer, Tools
from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.episode_player import EpisodePlayer, PlaySettings
from earl_core.rollout.errors import RolloutFailed
from earl_core.rollout.group_record import GroupRecord
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.trajectory.samples import Episode, EpisodeSpec

logger = logging.getLogger(__name__)

_NAMED_FAILURES = 3
RETRIES = 2
"""Retries of an episode that was lost by infrastructure."""


class Environments(Protocol):
    """The methods of an `EnvironmentPool` that the loop uses."""

    @property
    def tools(self) -> list[dict[str, Any]]: ...

    async def reset(self, episode_id: int, prompt: int, seed: int) -> list[Message]: ...

    async def step(self, episode_id: int, text: str) -> StepResult: ...

    async def use_tools(self, episode_id: int, message: Message) -> StepResult: ...

    async def close(self, episode_id: int) -> None: ...


async def play(
    engine: Engine,
    pool: Environments,
    chat: ChatTokenizer,
    specs: Sequence[EpisodeSpec],
    settings: PlaySettings,
    *,
    meter: LoadMeter | None = None,
    slots: asyncio.Semaphore | None = None,
    record: GroupRecord | None = None,
) -> list[Episode]:
    """Play every episode of `specs`; returns them in that order, failed ones included.

    slots: of live episodes, shared with what else is played at the same time. record: of what was
    played of them already, which is not sampled again; it grows, where the engine is not lockstep.

    `Episode.finish_reason` is one of done, max_turns, max_tokens, model_context, or one of
    `trajectory.samples.FAILED_REASONS` (with `info["failure"]` saying why). `Episode.info` may
    hold `outcome` and `metrics`. An episode that was lost by infrastructure is retried, twice at
    most; the meter counts it.

    Raises `ConfigError` for tools that the chat template cannot take, `RolloutFailed` when more
    than `settings.max_failed_share` of the episodes failed, `ContextOverflow` when one needs a
    longer context than the engine's and the model has it, `NotRepeated` where an environment does
    not react as it is recorded, and what the engine raises. When its task
    is cancelled, requests and environments are ended too.
    """
    meter = meter or LoadMeter(len(specs))
    tools = Tools(pool.tools)
    players = [
        EpisodePlayer(spec, chat, settings, meter, engine.max_model_len, tools) for spec in specs
    ]
    # What a template does with tools is no episode's fault.
    chat.prefix_stable(tools)
    slots = slots or live_slots(settings, len(specs))
    loop = _Loop(engine, pool, settings, meter, players, slots, record or GroupRecord({}))
    try:
        if engine.lockstep:
            await loop.lockstep()
        else:
            await loop.continuous()
        loop.check_failures()
    finally:
        await loop.clean_up()
    return [player.episode for player in players]


@dataclass
class _Loop:
    engine: Engine
    pool: Environments
    settings: PlaySettings
    meter: LoadMeter
    players: list[EpisodePlayer]
    slots: asyncio.Semaphore
    record: GroupRecord
    _open: set[int] = field(default_factory=set)
    _lost: Counter[int] = field(default_factory=Counter)
    _began: dict[int, float] = field(default_factory=dict)

    async def lockstep(self) -> None:
        """Waves of at most `max_live_episodes`; in each, all live episodes move turn by turn."""
        size = self.settings.max_live_episodes or len(self.players) or 1
        for start in range(0, len(self.players), size):
            live = self.players[start : start + size]
            await self._environments(*map(self._reset, live))
            while live := await self._lockstep_turn(live):
                self.meter.progressed()

    async def _lockstep_turn(self, players: list[EpisodePlayer]) -> list[EpisodePlayer]:
        self.check_failures()
        requests: list[GenerationRequest] = []
        asking: list[EpisodePlayer] = []
        for player in players:
            if not player.finished and (request := self._request(player)) is not None:
                requests.append(request)
                asking.append(player)
        if requests:
            completions = await self._generate(requests)
            answers = [p.answer(c) for p, c in zip(asking, completions, strict=True)]
            pairs = zip(asking, answers, strict=True)
            await self._react([(player, answer) for player, answer in pairs if answer is not None])
        await self._retire([player for player in players if player.finished])
        return [player for player in asking if not player.finished]

    async def continuous(self) -> None:
        """A coroutine for each episode, at most `max_live_episodes` of them in play."""
        try:
            async with asyncio.TaskGroup() as group:
                for player in self.players:
                    group.create_task(self._episode(player))
        except BaseExceptionGroup as errors:
            # One error is the cause; the others are the same one seen by other episodes.
            raise errors.exceptions[0] from None

    async def _episode(self, player: EpisodePlayer) -> None:
        async with self.slots:
            await self._environments(self._reset(player))
            while not player.finished:
                request = self._request(player)
                if request is None:
                    break
                answer = await self._answer(player, request)
                if answer is not None:
                    await self._react([(player, answer)])
            self.record.end(player.episode)
        await self._retire([player])
        self.check_failures()
        self.meter.progressed()

    async def _answer(self, player: EpisodePlayer, request: GenerationRequest) -> Answer | None:
        """The next answer of an episode: as it is recorded, or sampled."""
        record = self.record[player.spec.episode_id]
        if record is None:
            return player.answer((await self._generate([request]))[0])
        completion = record.recalled(request)
        if completion is None:
            (completion,) = await self._generate([record.sampling(request)])
            record.part(completion)
        # Where the context ends it is not whole, and goes on in a longer one.
        answer = player.answer(completion)
        if answer is not None:
            record.answered()
        return answer

    def _request(self, player: EpisodePlayer) -> GenerationRequest | None:
        if player.begins_new_sample:
            self.engine.finish([player.spec.episode_id])
        limit = self.settings.episode_seconds
        if (
            limit is not None
            and self.settings.clock() - self._began[player.spec.episode_id] > limit
        ):
            setting = "environment.episode_timeout_seconds"
            player.fail("environment_timeout", f"it took over {limit:g} s ({setting})")
            return None
        return player.request()

    async def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        meter, count = self.meter, len(requests)
        meter.requests_running(count)
        started = self.settings.clock()
        try:
            return await self.engine.generate(requests)
        finally:
            meter.requests_running(-count)
            meter.generation_wait += count * (self.settings.clock() - started)

    async def _reset(self, player: EpisodePlayer) -> None:
        spec = player.spec
        self._open.add(spec.episode_id)
        while not player.finished:
            self._began[spec.episode_id] = self.settings.clock()
            try:
                messages = await self.pool.reset(
                    spec.episode_id, spec.prompt_id, spec.environment_seed
                )
            except EnvironmentFailed as failure:
                self._fail(player, failure)
            else:
                player.begin(messages)
                return

    async def _react(self, answered: Sequence[tuple[EpisodePlayer, Answer]]) -> None:
        """Have tools and environments react to answers."""
        meter, started = self.meter, self.settings.clock()
        await asyncio.gather(*(self._step(player, answer) for player, answer in answered))
        seconds = self.settings.clock() - started
        for _, answer in answered:
            if answer.calls:
                meter.tool_wait += seconds
            else:
                meter.environment_wait += seconds
        meter.environment_steps += len(answered)

    async def _step(self, player: EpisodePlayer, answer: Answer) -> None:
        episode_id, meter = player.spec.episode_id, self.meter
        said = player.said(answer)
        if said is None and answer.error:
            meter.tool_errors += 1
            player.observe_unread(answer)
            return
        try:
            if said is None:
                meter.tool_calls += len(answer.calls)
                result = await self.pool.use_tools(episode_id, player.calls(answer))
                meter.tool_errors += result.info["tool_errors"]
            else:
                result = await self.pool.step(episode_id, said)
        except EnvironmentFailed as failure:
            self._fail(player, failure)
            await self._reset(player)
        else:
            if (record := self.record[episode_id]) is not None:
                record.reacted(result)
            player.observe(result)

    def _fail(self, player: EpisodePlayer, failure: EnvironmentFailed) -> None:
        """End an episode, or have it retried."""
        episode_id = player.spec.episode_id
        if failure.by_infrastructure and self._lost[episode_id] < RETRIES:
            self._lost[episode_id] += 1
            self.meter.episodes_retried += 1
            logger.warning("episode %d is retried: %s", episode_id, failure.reason)
            self.engine.finish([episode_id])
            self.record.begin_anew(episode_id)
            player.begin_anew()
            return
        timeout = failure.reason == "timeout"
        player.fail("environment_timeout" if timeout else "environment_error", str(failure))

    async def _environments(self, *calls: Coroutine[Any, Any, None]) -> None:
        started = self.settings.clock()
        await asyncio.gather(*calls)
        self.meter.environment_wait += len(calls) * (self.settings.clock() - started)
        self.meter.environment_steps += len(calls)

    async def _retire(self, players: list[EpisodePlayer]) -> None:
        if not players:
            return
        ids = [player.spec.episode_id for player in players]
        self.engine.finish(ids)
        await asyncio.gather(*(self._close(episode_id) for episode_id in ids))

    async def _close(self, episode_id: int) -> None:
        if episode_id in self._open:
            self._open.remove(episode_id)
            with contextlib.suppress(EnvironmentFailed):
                await self.pool.close(episode_id)

    def check_failures(self) -> None:
        """Raise `RolloutFailed` once too many episodes have failed."""
        played = (player.episode for player in self.players)
        check_failures(played, self.meter, self.settings, len(self.players))

    async def clean_up(self) -> None:
        """Free what unfinished episodes hold; does nothing after an undisturbed rollout."""
        self.meter.end()
        left = list(self._open)
        if left:
            logger.warning("the rollout ended with %d unfinished episodes", len(left))
            with contextlib.suppress(Exception):
                await self.engine.cancel(left)
            self.engine.finish(left)
            await asyncio.gather(*(self._close(episode_id) for episode_id in left))


def live_slots(settings: PlaySettings, episodes: int) -> asyncio.Semaphore:
    """Make as many slots as episodes may be in play at the same time."""
    return asyncio.Semaphore(settings.max_live_episodes or episodes or 1)


def check_failures(
    played: Iterable[Episode], meter: LoadMeter, settings: PlaySettings, count: int
) -> None:
    """Raise `RolloutFailed` once too many episodes have failed. count: of those played here."""
    failed, share = meter.episodes_failed, settings.max_failed_share
    episodes = settings.episodes or count
    if failed <= share * episodes:
        return
    lost = [episode for episode in played if episode.failed]
    reasons = dict(Counter(episode.finish_reason for episode in lost))
    named = [
        f"  episode {episode.episode_id} ({episode.finish_reason}): {episode.info['failure']}"
        for episode in lost[:_NAMED_FAILURES]
    ]
    shown = " The first failures:\n" + "\n".join(named)
    raise RolloutFailed.too_many(failed, episodes, share, reasons, shown)
