"""The record of a group that is played: answers, texts and rewards; it goes on elsewhere with them.

Environments are deterministic, so that one that is given the recorded answers again stands where
the other one stood. What it says and pays must be as it was, and so must the tokens that each
answer follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from earl_core.environments.base import StepResult
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.system.errors import EarlError
from earl_core.trajectory.samples import Episode, VersionSpan

_FORGOTTEN_FAILURES = ("environment_error", "environment_timeout")
"""Of environments, which may be mended before the group goes on: such episodes are played anew."""


class NotRepeated(EarlError):
    """An environment, or a chat template, does not repeat itself: play the group anew."""

    expected = False


@dataclass
class _Turn:
    """An answer, a digest of the tokens before it, and what the environment made of it; None: it
    has not answered, or was not asked."""

    prompt: str
    answer: Completion
    reaction: dict[str, Any] | None = None


@dataclass
class EpisodeRecord:
    """What was played of an episode: whole turns, and the answer that stands open."""

    turns: list[_Turn] = field(default_factory=list)
    open: _Turn | None = None
    _done: int = 0
    _prompt: str = ""

    def recalled(self, request: GenerationRequest) -> Completion | None:
        """The recorded answer to a request; None: it is to be sampled. Raises `NotRepeated`."""
        self._prompt = _digest(request.tokens)
        turn = self.turns[self._done] if self._done < len(self.turns) else self.open
        if turn is not None and turn.prompt != self._prompt:
            raise NotRepeated(
                f"episode {request.sequence_id}: other tokens stand before answer {self._done}"
            )
        return None if turn is None or turn is self.open else turn.answer

    def sampling(self, request: GenerationRequest) -> GenerationRequest:
        """The request with what is sampled of its answer, and whatever will be is recorded."""
        begun = None if self.open is None else self.open.answer
        return replace(request, begun=begun, on_part=self.part)

    def part(self, answer: Completion) -> None:
        """Record an answer as far as it is sampled."""
        # Whoever goes on with it has its experts anew.
        self.open = _Turn(self._prompt, replace(answer, routing=None))

    def answered(self) -> None:
        """Record that the answer is whole."""
        if self._done == len(self.turns) and self.open is not None:
            self.turns.append(self.open)
            self.open = None
        self._done += 1

    def reacted(self, result: StepResult) -> None:
        """Record what the environment, or tools, made of the answer. Raises `NotRepeated`."""
        found = {"messages": result.messages, "reward": result.reward, "done": result.done}
        turn = self.turns[self._done - 1]
        if turn.reaction not in (None, found):
            raise NotRepeated(f"its environment reacts otherwise to answer {self._done - 1}")
        turn.reaction = found

    def dump(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "turns": [_dumped(turn) for turn in self.turns],
            "open": None if self.open is None else _dumped(self.open),
        }

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> EpisodeRecord:
        """The record that was dumped, none of whose turns is repeated yet. Raises `ValueError`,
        or another error, for what no `dump` returns."""
        found = dumped["open"]
        return cls(
            turns=[_loaded(turn) for turn in dumped["turns"]],
            open=None if found is None else _loaded(found),
        )

    def versions(self) -> set[int]:
        """The policy versions that have sampled tokens of it."""
        turns = [*self.turns, *([] if self.open is None else [self.open])]
        return {span.policy_version for turn in turns for span in turn.answer.spans if span.end}


class GroupRecord:
    """The records of a group's episodes, by their ids. Of others it knows nothing, and records
    nothing; so an empty one is that of plays which nobody records."""

    def __init__(self, episodes: Mapping[int, EpisodeRecord]) -> None:
        self._episodes = dict(episodes)

    @classmethod
    def of(cls, episodes: Iterable[int]) -> GroupRecord:
        """The record of episodes of which nothing is played."""
        return cls({episode: EpisodeRecord() for episode in episodes})

    @property
    def episodes(self) -> set[int]:
        """The ids of its episodes."""
        return set(self._episodes)

    def __getitem__(self, episode: int) -> EpisodeRecord | None:
        return self._episodes.get(episode)

    @property
    def has_begun(self) -> bool:
        """True where something was played that need not be played again."""
        each = self._episodes.values()
        return any(record.turns or record.open for record in each)

    def versions(self) -> set[int]:
        """The policy versions that have sampled tokens of the group."""
        return set().union(*(record.versions() for record in self._episodes.values()))

    def begin_anew(self, episode: int) -> None:
        """Forget what was played of an episode."""
        if episode in self._episodes:
            self._episodes[episode] = EpisodeRecord()

    def end(self, episode: Episode) -> None:
        """An episode has ended: forget what was played of one that its environment failed."""
        if episode.finish_reason in _FORGOTTEN_FAILURES:
            self.begin_anew(episode.episode_id)

    def dump(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {str(episode): record.dump() for episode, record in self._episodes.items()}

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> GroupRecord:
        """The record that was dumped. Raises as `EpisodeRecord.load`."""
        return cls({int(episode): EpisodeRecord.load(each) for episode, each in dumped.items()})


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(np.array(tokens, np.int64).tobytes(), digest_size=8).hexdigest()


def _dumped(turn: _Turn) -> dict[str, Any]:
    answer = turn.answer
    return {
        "prompt": turn.prompt,
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
        "finish_reason": answer.finish_reason,
        "spans": answer.spans,
        "reaction": turn.reaction,
    }


def _loaded(turn: Mapping[str, Any]) -> _Turn:
    spans = [VersionSpan(*span) for span in turn["spans"]]
    ends = [0, *(span.end for span in spans)]
    if [span.first for span in spans] != ends[:-1] or ends[-1] != len(turn["tokens"]):
        raise ValueError("the spans of an answer do not cover its tokens in order")
    if len(turn["tokens"]) != len(turn["logprobs"]):
        raise ValueError("an answer has not a log-prob for each token")
    if not all(isinstance(token, int) for token in turn["tokens"]):
        raise ValueError("the tokens of an answer are no numbers")
    if not np.isfinite(np.array(turn["logprobs"], np.float64)).all():
        raise ValueError("the log-probs of an answer are not finite")
    answer = Completion(turn["tokens"], turn["logprobs"], turn["finish_reason"], spans)
    return _Turn(turn["prompt"], answer, turn["reaction"])
