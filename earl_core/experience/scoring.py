"""Scores of reward functions for a rank's episodes: many at a time, each asked again when it fails.

A function gets an episode as a dict of plain data:

    messages       [{"role": "user" or "assistant", "content": text}, ...]: what the policy was told
                   and what it answered, turn after turn; a text has all messages of its turn, those
                   of tools too. Conversations of an agent follow each other
    closing        what the environment said at the end
    environment    its label, where the run has several, else ""
    episode_id, group_id, prompt_id
    turns          how many answers
    turn_rewards   the environment's reward of each
    reward         their sum, and what an agent's roles share
    outcome, finish_reason
    scoring        what the environment gave for scoring (`info["scoring"]`), else None
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from earl_core.config import RunConfig
from earl_core.dispatch.reads.batch import Batch
from earl_core.environments.base import EnvironmentFailed, StepResult
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.real_numbers import is_no_number
from earl_core.experience.probe import Asked, Probed, score_difference
from earl_core.experience.reward import ScoreTally
from earl_core.experience.roles import own_rows, shared_of
from earl_core.experience.waiting import NO_ANSWER, KeptScores, Waiting
from earl_core.guard.seen import HUGE, Bounds, function_source
from earl_core.system.errors import EarlError
from earl_core.system.files import write_atomic
from earl_core.trajectory.samples import Episode, transcript, utf8

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 60.0


@dataclass
class Scores:
    """Scores of some episodes, by their ids: those of each function, by label; and the metrics that
    it told, by `label/name`. failures: why the others have no reward. invalid: those of these that
    a function, by its label, gave NaN, infinity or a number that is too large."""

    given: dict[int, dict[str, float]] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    invalid: dict[str, list[int]] = field(default_factory=dict)

    def tally(self, without: Collection[int] = ()) -> ScoreTally:
        """Tally the scores, in an order that does not depend on which was ready first. without:
        episodes that do not count, be they scored or not."""
        counted = (each for each in sorted(self.given.items()) if each[0] not in without)
        numbers = [{**given, **self.metrics[at]} for at, given in counted]
        return self.failures_alone(without).with_scores(numbers)

    def failures_alone(self, without: Collection[int] = ()) -> ScoreTally:
        """Tally what has failed so far. without: as of `tally`."""
        invalid = {number for each in self.invalid.values() for number in each}
        return ScoreTally.of(self.failed(without), len(invalid.difference(without)))

    def failed(self, without: Collection[int] = ()) -> dict[int, str]:
        """The failures but those of some episodes."""
        return {number: why for number, why in self.failures.items() if number not in without}


def scored_episodes(batch: Batch) -> list[dict[str, Any]]:
    """The episodes of a batch, which holds all their samples, as reward functions get them."""
    episodes: dict[int, dict[str, Any]] = {}
    named = ("episode_id", "group_id", "prompt_id")
    numbers = {name: batch.scalars(name).tolist() for name in named}
    texts = {
        name: batch.strings(name)
        for name in ("environment", "finish_reason", "outcome", "scoring", "texts")
    }
    shared, own = shared_of(batch).tolist(), own_rows(batch)
    for row in np.flatnonzero(own).tolist():
        identity = {name: values[row] for name, values in numbers.items()}
        episode = episodes.setdefault(
            identity["episode_id"],
            {
                **identity,
                **{name: values[row] for name, values in texts.items() if name != "texts"},
                "scoring": json.loads(texts["scoring"][row] or "null"),
                "shared": shared[row],
                "turn_rewards": [],
                "said": [],
            },
        )
        episode["turn_rewards"] += batch.row("turn_rewards", row).tolist()
        episode["said"] += json.loads(texts["texts"][row])
    return [readable(episode) for episode in episodes.values()]


def _as_scored(episode: Episode) -> dict[str, Any]:
    """An episode that is in no batch, as reward functions get it."""
    info = episode.info
    return readable(
        {
            "episode_id": episode.episode_id,
            "group_id": episode.group_id,
            "prompt_id": episode.prompt_id,
            "environment": episode.environment,
            "finish_reason": episode.finish_reason,
            "outcome": utf8(str(info.get("outcome", ""))),
            "scoring": info.get("scoring"),
            "shared": episode.shared_reward,
            "turn_rewards": [each for sample in episode.own for each in sample.turn_rewards],
            "said": [text for sample in episode.own for text in sample.texts],
        }
    )


def readable(episode: dict[str, Any]) -> dict[str, Any]:
    """An episode as reward functions get it. episode: its columns, `shared`, `turn_rewards` and
    `said` of all its samples."""
    rewards, shared = episode["turn_rewards"], episode.pop("shared")
    read = transcript(episode.pop("said"), rewards)
    messages: list[dict[str, str]] = []
    for turn in read["turns"]:
        messages.append({"role": "user", "content": turn["observation"]})
        messages.append({"role": "assistant", "content": turn["answer"]})
    return {
        **episode,
        "messages": messages,
        "closing": read["closing"],
        "turns": len(rewards),
        "reward": float(sum(rewards) + shared),
    }


class Scorer:
    """Runs a run's reward functions in processes of their own, from its first use until `close`.

    log: the rank's; beside it lies that of the functions. run_directory: gets the versions of a
    foreign Python's packages. here: as for `EnvironmentPool`. rank, report: of the rank; the latter
    hears of scores that are waited for.
    """

    def __init__(
        self,
        config: RunConfig,
        log: Path,
        run_directory: Path,
        here: bool = False,
        rank: int = 0,
        report: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._config, self._here = config, here
        self._run_directory, self._rank, self._report = run_directory, rank, report
        self._log = log.with_name(f"{log.stem}-rewards.log")
        self._record = run_directory / "reward_functions.json"
        self._pool: EnvironmentPool | None = None
        self._numbers = itertools.count()

    async def score(
        self,
        episodes: Sequence[Mapping[str, Any]],
        of_episodes: int,
        titles: Collection[str] = (),
        without: Collection[int] = (),
    ) -> Scores:
        """Ask every function for its scores of these episodes.

        of_episodes: how many the iteration has, in all ranks. titles: the functions that are asked;
        none: those of each episode's environment. without: episodes that are not among
        `of_episodes`, whose failures do not count. Raises `EarlError` as soon as more of the others
        have failed than may, `ConfigError` when the functions cannot be run. Scores that come later
        are waited for.
        """
        functions = self._config.reward.functions
        later = {at for at, each in enumerate(functions) if each.comes_later}
        return await self._scored(episodes, of_episodes, titles, without, later)

    async def _scored(
        self,
        episodes: Sequence[Mapping[str, Any]],
        of_episodes: int,
        titles: Collection[str],
        without: Collection[int],
        later: Collection[int],
    ) -> Scores:
        """As `score`. later: places of the functions that are waited for."""
        if self._pool is None:
            await self._start()
        found, slots = Scores(), asyncio.Semaphore(self._config.reward.concurrency)
        places = self._places(titles)
        waiting = self._waiting(later, slots) if episodes else {}

        def check() -> None:
            found.failures_alone(without).check(of_episodes, self._config)

        try:
            async with asyncio.TaskGroup() as group:
                for place, each in waiting.items():
                    whose = [one for one in episodes if place in places(one["environment"])]
                    group.create_task(self._wait(each, whose))
                for episode in episodes:
                    asked = [at for at in places(episode["environment"]) if not self._later(at)]
                    group.create_task(self._episode(episode, asked, found, slots, check))
        except BaseExceptionGroup as errors:
            # The others were cancelled for it.
            raise errors.exceptions[0] from None
        self._join(found, waiting, check)
        return found

    def _later(self, place: int) -> bool:
        return self._config.reward.functions[place].comes_later

    def _places(self, titles: Collection[str]) -> Callable[[str], list[int]]:
        """Places of the functions that score an environment's episodes. titles: as of `score`."""

        def of(environment: str) -> list[int]:
            return [
                place
                for place, each in enumerate(self._config.reward.functions)
                if (each.title in titles if titles else each.scores(environment))
            ]

        return of

    def _waiting(self, later: Collection[int], slots: asyncio.Semaphore) -> dict[int, Waiting]:
        if not later:
            return {}
        kept = KeptScores(self._run_directory, self._rank)
        settings = self._config.reward
        return {
            place: Waiting(
                settings.functions[place],
                kept,
                partial(self._one, place, slots=slots),
                settings.timeout_seconds,
            )
            for place in sorted(later)
        }

    async def _wait(self, waiting: Waiting, episodes: Sequence[Mapping[str, Any]]) -> None:
        of = len(episodes)
        await waiting.wait(
            episodes, lambda done: self._report({"episodes_done": done, "episodes": of})
        )

    def _join(
        self, found: Scores, waiting: Mapping[int, Waiting], check: Callable[[], None]
    ) -> None:
        """Put the scores that have come beside those of the others. Raises `EarlError` with all
        episodes that lack one, where too many do."""
        functions = self._config.reward.functions
        for place, each in waiting.items():
            title = functions[place].title
            for number, why in each.failures.items():
                found.failures.setdefault(number, f"{title}: {why}")
            try:
                check()
            except EarlError as error:
                if each.failures:
                    raise each.too_many(error) from error
                raise
            for number, score in each.found.items():
                found.given.setdefault(number, {})[title] = score
        for number in found.failures:
            found.given.pop(number, None)
            found.metrics.pop(number, None)
        order = [each.title for each in functions]
        for number, given in found.given.items():
            found.given[number] = dict(sorted(given.items(), key=lambda one: order.index(one[0])))

    async def rate(
        self, episodes: Sequence[Episode], of_episodes: int, titles: Collection[str] = ()
    ) -> None:
        """Have the rewards of these episodes' turns be what the reward stage would make of them. An
        episode that cannot be scored has failed. Scores that come later are left out: engines wait
        for none. titles: as of `score`, which raises."""
        played = [episode for episode in episodes if not episode.failed]
        scores = await self._scored(list(map(_as_scored, played)), of_episodes, titles, (), ())
        settings = self._config.reward
        for episode in played:
            if episode.episode_id in scores.failures:
                episode.finish_reason = "environment_error"
                episode.info["failure"] = scores.failures[episode.episode_id]
                continue
            episode.shared_reward *= settings.environment_weight
            for sample in episode.samples:
                sample.turn_rewards = [
                    settings.environment_weight * reward for reward in sample.turn_rewards
                ]
            given = scores.given[episode.episode_id]
            episode.own[-1].turn_rewards[-1] += settings.added(given)

    async def ask_again(self, probed: Probed, bounds: Mapping[str, Bounds]) -> Asked:
        """Have functions, one after the other, score recorded episodes that they have scored
        before. What fails by something else than its number says nothing. bounds: by source."""
        found, slots = Asked.about(probed), asyncio.Semaphore(self._config.reward.concurrency)
        for place, function in enumerate(self._config.reward.functions):
            title, source = function.title, function_source(function.title)
            asked = [e for e in probed.episodes.get(source, ()) if title in e.scores]
            if not asked:
                continue
            with found.asking(source, len(asked)):
                if self._pool is None:
                    await self._start()
                answers = await asyncio.gather(
                    *(self._one(place, json.dumps(each.episode), slots, 0) for each in asked)
                )
                for each, answer in zip(asked, answers, strict=True):
                    now = answer.reward if isinstance(answer, StepResult) else None
                    if isinstance(answer, StepResult) or is_no_number(answer.detail):
                        told = score_difference(each.scores[title], now, bounds.get(source, HUGE))
                        found.add(source, each.episode["episode_id"], told)
        return found

    async def close(self) -> None:
        """End the processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.stop()

    async def _start(self) -> None:
        pool = EnvironmentPool.of_rewards(self._config.reward, log_path=self._log, here=self._here)
        await pool.start()
        self._pool = pool
        if (python := self._config.reward.python) is not None:
            versions = {"interpreter": python, **pool.versions}
            write_atomic(self._record, json.dumps(versions, indent=1).encode())

    async def _episode(
        self,
        episode: Mapping[str, Any],
        asked: Sequence[int],
        found: Scores,
        slots: asyncio.Semaphore,
        check: Callable[[], None],
    ) -> None:
        functions, number = self._config.reward.functions, episode["episode_id"]
        text = json.dumps(episode)
        results = await asyncio.gather(*(self._one(place, text, slots) for place in asked))
        given: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for place, result in zip(asked, results, strict=True):
            label = functions[place].title
            if isinstance(result, EnvironmentFailed):
                found.failures[number] = f"{label}: {result.reason}: {result.detail.strip()}"
                if is_no_number(result.detail):
                    found.invalid.setdefault(label, []).append(number)
                check()
                return
            given[label] = result.reward
            told = result.info["metrics"]
            metrics |= {f"{label}/{name}": value for name, value in told.items()}
        found.given[number], found.metrics[number] = given, metrics

    async def _one(
        self, place: int, text: str, slots: asyncio.Semaphore, retries: int | None = None
    ) -> StepResult | EnvironmentFailed:
        """retries: None: as many as the run has."""
        assert self._pool is not None
        retries = self._config.reward.retries if retries is None else retries
        # The place is held during the pauses, so that what is overloaded is asked less.
        async with slots:
            attempt = 0
            while True:
                number = next(self._numbers)
                try:
                    await self._pool.reset(number, place, 0)
                    return await self._pool.step(number, text)
                except EnvironmentFailed as error:
                    # A score that is waited for is asked for again by whoever waits. What is no
                    # number is an answer, too.
                    waits = self._later(place) and error.reason in NO_ANSWER
                    if attempt == retries or waits or is_no_number(error.detail):
                        return error
                    label = self._config.reward.functions[place].title
                    logger.warning("the score of %s is tried again: %s", label, error.reason)
                finally:
                    with suppress(EnvironmentFailed):
                        await self._pool.close(number)
                await asyncio.sleep(min(2.0**attempt, _LONGEST_PAUSE))
                attempt += 1
