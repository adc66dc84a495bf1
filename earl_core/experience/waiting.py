"""Scores that come later: asked for again and again until a deadline, and kept as they come."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from earl_core.config.reward import RewardFunctionConfig
from earl_core.environments.base import EnvironmentFailed, StepResult
from earl_core.environments.later import PENDING, episode_key
from earl_core.system.errors import EarlError

logger = logging.getLogger(__name__)

DIRECTORY = "later"
"""In the run directory: the scores that have come."""

_TOLD_SECONDS = 30.0
_MOST_NAMED = 50

Ask = Callable[[str], Awaitable[StepResult | EnvironmentFailed]]
"""Asks once for the score of an episode, its JSON."""


class KeptScores:
    """Scores that have come, on disk, so that nobody is asked for one twice.

    directory: of the run. rank: writes files of its own.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory / DIRECTORY
        self._own = self._directory / f"{rank}.jsonl"
        self._known: dict[tuple[str, str], float] = {}
        for path in sorted(self._directory.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                # Where the disk was full a line may be a part.
                with suppress(ValueError):
                    function, key, score = json.loads(line)
                    self._known[function, key] = score

    def of(self, function: RewardFunctionConfig, key: str) -> float | None:
        """The score that a function gave, by the episode's key; None where none has come."""
        return self._known.get((_asked_whom(function), key))

    def keep(self, function: RewardFunctionConfig, key: str, score: float) -> None:
        """Write a score down."""
        asked = _asked_whom(function)
        self._known[asked, key] = score
        self._directory.mkdir(exist_ok=True)
        with self._own.open("a") as file:
            file.write(json.dumps([asked, key, score]) + "\n")


def _asked_whom(function: RewardFunctionConfig) -> str:
    """Tell functions apart by whom they ask; how long one waits for him does not matter."""
    whom = [function.options.get(name) for name in ("directory", "url")]
    digest = hashlib.sha256(json.dumps(whom).encode()).hexdigest()
    return f"{function.title}-{digest[:16]}"


class Waiting:
    """The scores of one function for some episodes.

    found: gets them, by episode. failures: gets why an episode has none.
    """

    def __init__(self, function: RewardFunctionConfig, kept: KeptScores, ask: Ask) -> None:
        self._function, self._kept, self._ask = function, kept, ask
        self.found: dict[int, float] = {}
        self.failures: dict[int, str] = {}

    async def wait(
        self, episodes: Sequence[Mapping[str, Any]], told: Callable[[int], None]
    ) -> None:
        """Wait until all have a score, or have failed, or the deadline is over.

        told: hears at each look how many are there."""
        wait = self._function.wait
        began = last = time.monotonic()
        keys = {each["episode_id"]: episode_key(each) for each in episodes}
        left = {each["episode_id"]: json.dumps(each) for each in episodes}
        for number, key in keys.items():
            if (score := self._kept.of(self._function, key)) is not None:
                self.found[number] = score
                del left[number]
        while True:
            looks = list(left.items())
            answers = await asyncio.gather(*(self._ask(text) for _, text in looks))
            for (number, _), answer in zip(looks, answers, strict=True):
                if self._take(number, keys[number], answer):
                    del left[number]
            told(len(episodes) - len(left))
            over = began + wait.deadline - time.monotonic()
            if not left or over <= 0:
                break
            if time.monotonic() - last >= _TOLD_SECONDS or last == began:
                last = time.monotonic()
                logger.info(
                    "%s: %d of %d episodes have a score; waiting for %s, at most %.0f s",
                    self._function.title, len(episodes) - len(left), len(episodes),
                    named(left), over,
                )  # fmt: skip
            await asyncio.sleep(min(wait.poll, over))
        if left:
            title = self._function.title
            logger.warning("%s: no score of %s after %g s", title, named(left), wait.deadline)
        for number in left:
            self.failures[number] = f"no score came within {wait.deadline:g} s"

    def _take(self, number: int, key: str, answer: StepResult | EnvironmentFailed) -> bool:
        """Tell whether the answer is the last one for its episode."""
        if isinstance(answer, EnvironmentFailed):
            self.failures[number] = f"{answer.reason}: {answer.detail.strip()}"
            return True
        if answer.info["metrics"].get(PENDING):
            return False
        self.found[number] = answer.reward
        self._kept.keep(self._function, key, answer.reward)
        return True

    def too_many(self, error: EarlError) -> EarlError:
        """The error that says which episodes lack a score, for one that says that too many do."""
        title = self._function.title
        first = next(iter(self.failures.values()))
        return EarlError(
            f"{title!r} has given no score for {named(self.failures)} ({first})",
            remedy=f"have {title!r} score them, or raise its deadline_seconds, and resume: the "
            "scores that have come are kept",
            payload={**error.payload, "lacking": sorted(self.failures)},
        )


def named(episodes: Mapping[int, Any]) -> str:
    """The numbers of some episodes, not too many."""
    numbers = sorted(episodes)
    shown = ", ".join(map(str, numbers[:_MOST_NAMED]))
    more = len(numbers) - _MOST_NAMED
    return f"episodes {shown}" + (f" and {more} more" if more > 0 else "")
