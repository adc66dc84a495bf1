"""One episode of a trial with random texts, and the same episode again."""

from __future__ import annotations

import random
import re
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.environments.hosting.pool import EnvironmentPool

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_NUMBER = re.compile(r"\b[0-9]{1,9}\b")
_WORD = re.compile(r"\w+")
_LONG = 2000
_PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n" + "é→中"


class _RandomTexts:
    """The answers of one episode, such as a model might give before it has learnt anything.

    number: of the episode. Every third gives legal answers where the environment knows them, every
    third takes moves, numbers and words out of what it was shown, and every third writes random
    characters, among them nothing at all and a long text. characters: the environment's own.
    """

    def __init__(self, number: int, characters: str) -> None:
        self._random = random.Random(f"trial/{number}")
        self._kind = number % 3
        self._characters = characters or _PRINTABLE

    def answer(self, messages: Sequence[Message], legal: Sequence[str]) -> str:
        """An answer to the last messages. legal: what the environment says that it takes."""
        if self._kind == 0 and legal:
            return self._random.choice(legal)
        shown = "\n".join(message["content"] for message in messages)
        if self._kind < 2 and (found := self._found(shown)):
            return self._random.choice(found)
        length = self._random.choice((0, 1, 1, 2, 4, 20, _LONG))
        return "".join(self._random.choices(self._characters, k=length))

    def _found(self, shown: str) -> list[str]:
        """Moves in brackets; without these a number in the range of those shown, or the words."""
        numbers = [int(digits) for digits in _NUMBER.findall(shown)]
        if moves := _BRACKETED.findall(shown):
            return moves
        if numbers and self._random.random() < 0.5:
            return [str(self._random.randint(min(numbers), max(numbers)))]
        return _WORD.findall(shown)


Reply = list[Message] | StepResult


@dataclass(frozen=True)
class Played:
    """An episode: its place, what was said, what the environment answered, and how long it took.

    replies: of `reset`, then one for each text. seconds: of each reply. failure: what ended it,
    if that was no result.
    """

    prompt: int
    seed: int
    texts: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: EnvironmentFailed | None = None

    @property
    def results(self) -> list[StepResult]:
        """Results that the steps returned."""
        return [reply for reply in self.replies if isinstance(reply, StepResult)]

    @property
    def done(self) -> bool:
        """True when the environment ended the episode."""
        return bool(self.results) and self.results[-1].done

    @property
    def messages(self) -> list[Message]:
        """All that the agent saw."""
        shown = (
            reply.messages if isinstance(reply, StepResult) else reply for reply in self.replies
        )
        return [message for messages in shown for message in messages]


@dataclass(frozen=True)
class Difference:
    """The point at which an episode that was played again went another way: its place, and the
    number of the reply, from 0 for `reset`. before, after: both replies as text."""

    prompt: int
    seed: int
    turn: int
    before: str
    after: str


async def play(pool: EnvironmentPool, number: int, turns: int) -> Played:
    """Play an episode with random texts, at most so many. Two neighbours share a prompt."""
    played = Played(number // 2, seed=number)
    texts = _RandomTexts(number, pool.characters)
    try:
        shown: list[Message] = await _timed_reset(pool, number, played)
        for _ in range(turns):
            answer = texts.answer(shown, await pool.legal_answers(number))
            result = await _timed_step(pool, number, played, answer)
            if result.done:
                break
            shown = result.messages
    except EnvironmentFailed as error:
        return Played(**{**vars(played), "failure": error})
    finally:
        await pool.close(number)
    return played


async def replay(pool: EnvironmentPool, number: int, before: Played) -> Played:
    """Play an episode again: the same place, the same texts."""
    played = Played(before.prompt, before.seed)
    try:
        await _timed_reset(pool, number, played)
        for text in before.texts:
            if (await _timed_step(pool, number, played, text)).done:
                break
    except EnvironmentFailed as error:
        return Played(**{**vars(played), "failure": error})
    finally:
        await pool.close(number)
    return played


def difference(before: Played, after: Played) -> Difference | None:
    """The first reply that is another."""
    said = [*map(_shown, before.replies)]
    again = [*map(_shown, after.replies)]
    if after.failure is not None:
        again.append(str(after.failure))
    for turn in range(max(len(said), len(again))):
        pair = ["nothing" if turn >= len(each) else each[turn] for each in (said, again)]
        if pair[0] != pair[1]:
            return Difference(before.prompt, before.seed, turn, *pair)
    return None


def _shown(reply: Reply) -> str:
    if not isinstance(reply, StepResult):
        return repr([message["content"] for message in reply])
    contents = [message["content"] for message in reply.messages]
    return f"{contents!r}, reward {reply.reward!r}, done {reply.done}, info {reply.info!r}"


async def _timed_reset(pool: EnvironmentPool, number: int, played: Played) -> list[Message]:
    began = time.perf_counter()
    messages = await pool.reset(number, played.prompt, played.seed)
    played.seconds.append(time.perf_counter() - began)
    played.replies.append(messages)
    return messages


async def _timed_step(pool: EnvironmentPool, number: int, played: Played, text: str) -> StepResult:
    played.texts.append(text)
    began = time.perf_counter()
    result = await pool.step(number, text)
    played.seconds.append(time.perf_counter() - began)
    played.replies.append(result)
    return result
