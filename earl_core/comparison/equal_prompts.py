"""Episodes that runs have played of equal prompts, from the files of kept episodes.

Prompts are equal where the environment and the first observation are: numbers of prompts mean other
states under other seeds, and the same row of a data set has another number in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from earl_core.comparison.recorded_run import RecordedRun
from earl_core.run.episodes import NAME, EpisodesDamaged
from earl_core.run.kept_episodes import kept_episodes

_FILES = 10
_EPISODES = 512
"""The newest files of a run that are read, and the first episodes of each."""

_FIELDS = ("episode_id", "environment", "outcome", "finish_reason", "reward")


class Played(NamedTuple):
    """An episode. texts: observation and answer of each turn, then what was said at the end.
    rewards: of its turns. reward: None where it was not scored. What rules of redaction leave out
    is None or empty, what they hash a text."""

    iteration: int
    episode_id: int | str | None
    environment: str
    outcome: str
    finish_reason: str
    reward: float | None
    texts: list[str]
    rewards: list[float | None]


class EqualPrompt(NamedTuple):
    """A prompt that all runs have played. episodes: of each run, the newest iteration's."""

    environment: str
    prompt: str
    episodes: list[list[Played]]

    @property
    def returns(self) -> list[float | None]:
        """The mean reward of each run's episodes; None where none was scored."""
        scored = [[each.reward for each in own if each.reward is not None] for own in self.episodes]
        return [float(np.mean(own)) if own else None for own in scored]

    @property
    def spread(self) -> float:
        """How far the runs' mean rewards lie apart."""
        known = [value for value in self.returns if value is not None]
        return max(known) - min(known) if len(known) > 1 else 0.0


def equal_prompts(
    runs: Sequence[RecordedRun], most: int, most_episodes: int
) -> tuple[list[EqualPrompt], list[str]]:
    """The prompts of all runs, those first whose mean rewards lie farthest apart; and what is wrong
    with files that could not be read. most_episodes: of a run and prompt. Episodes are redacted as
    their runs ask for; which prompts are equal is found out before."""
    damaged: list[str] = []
    played = [_played(run, most_episodes, damaged) for run in runs]
    shared = [key for key in played[0] if all(key in each for each in played)]
    found = [_prompt([each[key] for each in played]) for key in shared]
    return sorted(found, key=lambda each: -each.spread)[:most], damaged


def _prompt(episodes: list[list[Played]]) -> EqualPrompt:
    first = episodes[0][0]
    return EqualPrompt(first.environment, "".join(first.texts[:1]), episodes)


def _played(run: RecordedRun, most: int, damaged: list[str]) -> dict[int, list[Played]]:
    """Episodes by the hash of environment and first observation, of the newest iteration that has
    some."""
    files = sorted(run.path.glob(f"iterations/[0-9]*/{NAME}"), reverse=True)
    found: dict[int, list[Played]] = {}
    for file in files[:_FILES]:
        try:
            kept = kept_episodes(file, run.redaction, _FIELDS, most=_EPISODES)
        except FileNotFoundError:
            continue  # A live run removes its oldest.
        except EpisodesDamaged as error:
            damaged.append(str(error))
            continue
        newer = set(found)
        for each in kept.episodes:
            own = found.setdefault(each["begins"], [])
            if each["begins"] not in newer and len(own) < most:
                told = {name: each[name] for name in ("iteration", *_FIELDS, "texts")}
                own.append(Played(**told, rewards=each["turn_rewards"]))
    return found
