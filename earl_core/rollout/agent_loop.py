"""The agent loop: plays many episodes against one engine and one pool of environments.

An `EpisodePlayer` is one episode as a state machine: observation, request, answer, step result, and
so on. It holds the tokens, the budgets and the finish reason, and knows nothing of engines,
environments or scheduling; one of two schedules moves it on. Lockstep, for engines that want whole
batches: each turn, the requests of all live episodes go to the engine at once, then all
environments step; equal inputs give equal episodes. Continuous, for engines that batch by
themselves: a coroutine for each episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.environments.pool import EnvironmentPool
from earl_core.rollout.chat import ChatTokenizer, Conversation
from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.errors import ContextOverflow, RolloutFailed
from earl_core.rollout.rollout_stats import LoadMeter
from earl_core.trajectory.samples import Episode, EpisodeSpec, Sample, derive_seed

logger = logging.getLogger(__name__)

_NAMED_FAILURES = 3
RETRIES = 2
"""Of an episode that was lost by infrastructure."""


async def play(
    engine: Engine,
    pool: EnvironmentPool,
    chat: ChatTokenizer,
    specs: Sequence[EpisodeSpec],
    settings: PlaySettings,
    *,
    meter: LoadMeter | None = None,
) -> list[Episode]:
    """Play every episode of `specs`; returns them in that order, failed ones included.

    `Episode.finish_reason` is one of done, max_turns, max_tokens, model_context, or one of
    `trajectory.samples.FAILED_REASONS` (with `info["failure"]` saying why). `Episode.info` may
    hold `outcome` and `metrics`. An episode that was lost by infrastructure is retried, twice at
    most; the meter counts it.

    Raises `RolloutFailed` when more than `settings.max_failed_share` of the episodes failed,
    `ContextOverflow` when one needs a longer context than the engine's and the model has it, and
    what the engine raises. When its task is cancelled, requests and environments are ended too.
    """
    meter = meter or LoadMeter(len(specs))
    players = [EpisodePlayer(spec, chat, settings, meter, engine.max_model_len) for spec in specs]
    loop = _Loop(engine, pool, settings, meter, players)
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
    pool: EnvironmentPool
    settings: PlaySettings
    meter: LoadMeter
    players: list[EpisodePlayer]
    _open: set[int] = field(default_factory=set)
    _lost: Counter[int] = field(default_factory=Counter)

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
            texts = [p.answer(c) for p, c in zip(asking, completions, strict=True)]
            await self._environments(
                *(self._step(p, t) for p, t in zip(asking, texts, strict=True) if t is not None)
            )
        await self._retire([player for player in players if player.finished])
        return [player for player in asking if not player.finished]

    async def continuous(self) -> None:
        """A coroutine for each episode, at most `max_live_episodes` of them in play."""
        slots = asyncio.Semaphore(self.settings.max_live_episodes or len(self.players) or 1)
        try:
            async with asyncio.TaskGroup() as group:
                for player in self.players:
                    group.create_task(self._episode(player, slots))
        except BaseExceptionGroup as errors:
            # One error is the cause; the others are the same one seen by other episodes.
            raise errors.exceptions[0] from None

    async def _episode(self, player: EpisodePlayer, slots: asyncio.Semaphore) -> None:
        async with slots:
            await self._environments(self._reset(player))
            while not player.finished:
                request = self._request(player)
                if request is None:
                    break
                (completion,) = await self._generate([request])
                text = player.answer(completion)
                if text is not None:
                    await self._environments(self._step(player, text))
        await self._retire([player])
        self.check_failures()
        self.meter.progressed()

    def _request(self, player: EpisodePlayer) -> GenerationRequest | None:
        if player.begins_new_sample:
            self.engine.finish([player.spec.episode_id])
        return player.request()

    async def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        meter, count = self.meter, len(requests)
        meter.requests_running(count)
        started = time.perf_counter()
        try:
            return await self.engine.generate(requests)
        finally:
            meter.requests_running(-count)
            meter.generation_wait += count * (time.perf_counter() - started)

    async def _reset(self, player: EpisodePlayer) -> None:
        spec = player.spec
        self._open.add(spec.episode_id)
        while not player.finished:
            try:
                messages = await self.pool.reset(
                    spec.episode_id, spec.prompt_id, spec.environment_seed
                )
            except EnvironmentFailed as failure:
                self._fail(player, failure)
            else:
                player.begin(messages)
                return

    async def _step(self, player: EpisodePlayer, text: str) -> None:
        try:
            result = await self.pool.step(player.spec.episode_id, text)
        except EnvironmentFailed as failure:
            self._fail(player, failure)
            await self._reset(player)
        else:
            player.observe(result)

    def _fail(self, player: EpisodePlayer, failure: EnvironmentFailed) -> None:
        """End an episode, or have it retried."""
        episode_id = player.spec.episode_id
        if failure.by_infrastructure and self._lost[episode_id] < RETRIES:
            self._lost[episode_id] += 1
            self.meter.episodes_retried += 1
            logger.warning("episode %d is retried: %s", episode_id, failure.reason)
            self.engine.finish([episode_id])
            player.begin_anew()
            return
        timeout = failure.reason == "timeout"
        player.fail("environment_timeout" if timeout else "environment_error", str(failure))

    async def _environments(self, *calls: Coroutine[Any, Any, None]) -> None:
        started = time.perf_counter()
        await asyncio.gather(*calls)
        self.meter.environment_wait += len(calls) * (time.perf_counter() - started)
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


def check_overflow(tokens: int, max_model_len: int, positions: int | None) -> None:
    """Raise `ContextOverflow` where the model has more positions than the engine."""
    if positions is not None and positions > max_model_len:
        raise ContextOverflow(min(tokens, positions), max_model_len, positions)


@dataclass(frozen=True)
class PlaySettings:
    """Budgets and sampling of a rollout; `None` means no limit but the model's context.

    temperature: 0 is greedy. max_failed_share: the rollout fails when more than this share of
    its episodes has failed. episodes: how many it has, where those played here are a part of it.
    max_live_episodes: episodes that are in play at the same time. positions: the model's own
    position range, the only one that ends an episode; None: that of the engine.
    """

    max_turns: int
    max_tokens_per_turn: int | None = None
    max_tokens_per_episode: int | None = None
    temperature: float = 1.0
    max_failed_share: float = 0.1
    episodes: int | None = None
    max_live_episodes: int | None = None
    positions: int | None = None


class EpisodePlayer:
    """Plays one `EpisodeSpec`; `finished` once `episode.finish_reason` is set.

    `request` and `answer` raise `ContextOverflow` where the engine's context, `max_model_len`, ends
    before the model's.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        chat: ChatTokenizer,
        settings: PlaySettings,
        meter: LoadMeter,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self._chat = chat
        self._settings = settings
        self._meter = meter
        self._max_model_len = max_model_len
        self._live = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was played; `begin` comes next."""
        self._count_live(-self._live)
        self.episode = Episode(self.spec.episode_id, self.spec.group_id, self.spec.prompt_id)
        self.finished = False
        self._conversation = Conversation(self._chat)
        self._pending: list[int] = []
        self._new_sample = True
        self._sample = Sample()
        self._answer = Completion([], [], "stop", -1)
        self._turn = 0
        self._sampled = 0
        self._observation = ""

    def begin(self, messages: Sequence[Message]) -> None:
        """Take the environment's first messages."""
        self._pending = self._conversation.begin(messages)
        self._note_observation(messages)

    def request(self) -> GenerationRequest | None:
        """The next request, or None when the model's context has no room for an answer."""
        standing = 0 if self._new_sample else len(self._sample.tokens)
        if standing + len(self._pending) >= self._max_model_len:
            self._check_overflow(standing + len(self._pending) + 1)
            if self._turn == 0:
                self.fail(
                    "prompt_too_long",
                    f"its first prompt has {len(self._pending)} tokens and the context is "
                    f"{self._max_model_len}: raise rollout.max_model_len or shorten the prompt",
                )
            else:
                self._finish("model_context")
            return None
        if self._new_sample:
            self._sample = Sample()
            self.episode.samples.append(self._sample)
            self._new_sample = False
        self._sample.begin_turn(self._pending, self._observation)
        self._meter.prompt_tokens += len(self._pending)
        self._count_live(len(self._pending))
        return GenerationRequest(
            sequence_id=self.spec.episode_id,
            tokens=list(self._sample.tokens),
            max_tokens=self._budget(),
            temperature=self._settings.temperature,
            seed=derive_seed(self.spec.seed, "draw", self._turn),
            stop_token_ids=self._chat.stop_token_ids,
        )

    def answer(self, completion: Completion) -> str | None:
        """Take the engine's answer; returns its text, or None when the request was cancelled."""
        if completion.finish_reason == "cancelled":
            self.fail("cancelled", "the engine gave the request up")
            return None
        if completion.finish_reason == "model_context":
            self._check_overflow(self._max_model_len + 1)
        self._answer = completion
        text = self._chat.text_of(completion.tokens)
        self._sample.answer(completion.tokens, completion.logprobs, completion.policy_version, text)
        self._turn += 1
        self._sampled += len(completion.tokens)
        self._meter.generated_tokens += len(completion.tokens)
        self._count_live(len(completion.tokens))
        return text

    def observe(self, result: StepResult) -> None:
        """Take the environment's reaction to the answer."""
        self._sample.turn_rewards[-1] = result.reward
        info = self.episode.info
        for key in ("outcome", "metrics"):
            if key in result.info:
                info[key] = result.info[key]
        self._note_observation(result.messages)
        limit = self._settings.max_tokens_per_episode
        if result.done:
            self._finish("done")
        elif self._turn >= self._settings.max_turns:
            self._finish("max_turns")
        elif self._answer.finish_reason == "model_context":
            self._finish("model_context")
        elif limit is not None and self._sampled >= limit:
            self._finish("max_tokens")
        else:
            self._pending, self._new_sample = self._conversation.follow(
                self._answer.tokens, result.messages
            )

    def fail(self, reason: str, detail: str) -> None:
        """End as a failed episode."""
        self.episode.info["failure"] = detail
        self._finish(reason)

    @property
    def begins_new_sample(self) -> bool:
        """Whether the next request does not extend the tokens before it."""
        return self._new_sample and self._turn > 0

    def _check_overflow(self, tokens: int) -> None:
        check_overflow(tokens, self._max_model_len, self._settings.positions)

    def _budget(self) -> int | None:
        turn, episode = self._settings.max_tokens_per_turn, self._settings.max_tokens_per_episode
        left = None if episode is None else episode - self._sampled
        return min((limit for limit in (turn, left) if limit is not None), default=None)

    def _count_live(self, tokens: int) -> None:
        self._live += tokens
        self._meter.tokens_live(tokens)

    def _finish(self, reason: str) -> None:
        self.finished = True
        self.episode.finish_reason = reason
        if self.episode.samples:
            self.episode.samples[-1].texts.append(self._observation)
        self._pending = []
        self._count_live(-self._live)
        meter = self._meter
        meter.episodes_done += 1
        if self.episode.failed:
            meter.episodes_failed += 1
        else:
            meter.reward_total += self.episode.total_reward

    def _note_observation(self, messages: Sequence[Message]) -> None:
        self._observation = "\n".join(message["content"] for message in messages)
