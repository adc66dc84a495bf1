"""Scores that come later: asked for again and again until a deadline, and kept as they come."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
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

NO_ANSWER = ("timeout", "lost", "host_died")
"""Reasons of failures that say nothing about the score: it may come with a later look."""

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
        with self._own.open("a+b") as file:
            # Whoever was killed, or had no disk left, may have written a part of a line.
            whole = not file.tell() or (file.seek(-1, os.SEEK_END) and file.read() == b"\n")
            file.write(b"" if whole else b"\n")
            file.write(json.dumps([asked, key, score]).encode() + b"\n")


def _asked_whom(function: RewardFunctionConfig) -> str:
    """Tell functions apart by whom they ask; how long one waits for him does not matter."""
    whom = [function.options.get(name) for name in ("directory", "url")]
    digest = hashlib.sha256(json.dumps(whom).encode()).hexdigest()
    return f"{function.title}-{digest[:16]}"


class Waiting:
    """The scores of one function for some episodes.

    look_seconds: limit of the last looks, which begin at the deadline. found: gets the scores, by
    episode. failures: gets why an episode has none.
    """

    def __init__(
        self, function: RewardFunctionConfig, kept: KeptScores, ask: Ask, look_seconds: float
    ) -> None:
        self._function, self._kept, self._ask = function, kept, ask
        self._look_seconds = look_seconds
        self._unanswered: dict[int, str] = {}
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
        over, final = wait.deadline, False
        while True:
            looks = [self._look(number, keys[number], text) for number, text in left.items()]
            whole = await _ended(looks, self._look_seconds if final else over)
            left = {n: left[n] for n in left if n not in self.found and n not in self.failures}
            told(len(episodes) - len(left))
            if not left or final or not whole:
                break
            over = max(0.0, began + wait.deadline - time.monotonic())
            final = over <= wait.poll
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
            why = self._unanswered.get(number, "")
            self.failures[number] = f"no score came within {wait.deadline:g} s{why}"

    async def _look(self, number: int, key: str, text: str) -> None:
        """Ask once, and keep what came at once: others may be slow."""
        answer = await self._ask(text)
        self._unanswered.pop(number, None)
        if isinstance(answer, EnvironmentFailed):
            why = f"{answer.reason}: {answer.detail.strip()}"
            if answer.reason in NO_ANSWER:
                self._unanswered[number] = f"; the last look: {why}"
            else:
                self.failures[number] = why
        elif not answer.info["metrics"].get(PENDING):
            self._kept.keep(self._function, key, answer.reward)
            self.found[number] = answer.reward

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


async def _ended(looks: Iterable[Coroutine[Any, Any, None]], seconds: float) -> bool:
    """Run the looks for so long, and cancel the rest; tell whether none was left. Raises what one
    of them raised."""
    tasks = [asyncio.create_task(look) for look in looks]
    if not tasks:
        return True
    try:
        done, slow = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return not slow
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def named(episodes: Mapping[int, Any]) -> str:
    """The numbers of some episodes, not too many."""
    numbers = sorted(episodes)
    shown = ", ".join(map(str, numbers[:_MOST_NAMED]))
    more = len(numbers) - _MOST_NAMED
    return f"episodes {shown}" + (f" and {more} more" if more > 0 else "")
