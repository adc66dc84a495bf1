"""Episodes that runs have played of equal prompts, from the files of kept episodes.

Prompts are equal where the environment and the first observation are: numbers of prompts mean other
states under other seeds, and the same row of a data set has another number in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from earl_core.comparison.recorded_run import RecordedRun
from earl_core.run.episodes import NAME, EpisodesDamaged, read_samples
from earl_core.secrets import redact
from earl_core.trajectory.samples import OPPONENT_ROLE

_FILES = 10
_EPISODES = 512
"""The newest files of a run that are read, and the first episodes of each."""

_SCALARS = ("episode_id", "environment", "outcome", "finish_reason", "reward")
_COLUMNS = (*_SCALARS, "texts", "turn_rewards", "role")


class Played(NamedTuple):
    """An episode. texts: observation and answer of each turn, then what was said at the end.
    rewards: of its turns. reward: None where it was not scored."""

    iteration: int
    episode_id: int
    environment: str
    outcome: str
    finish_reason: str
    reward: float | None
    texts: list[str]
    rewards: list[float]


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
    with files that could not be read. most_episodes: of a run and prompt. Texts are redacted."""
    damaged: list[str] = []
    played = [_played(run, most_episodes, damaged) for run in runs]
    shared = [key for key in played[0] if all(key in each for each in played)]
    found = [EqualPrompt(*key, [each[key] for each in played]) for key in shared]
    return sorted(found, key=lambda each: -each.spread)[:most], damaged


def _played(run: RecordedRun, most: int, damaged: list[str]) -> dict[tuple[str, str], list[Played]]:
    """Episodes by environment and first observation, of the newest iteration that has some."""
    files = sorted(run.path.glob(f"iterations/[0-9]*/{NAME}"), reverse=True)
    found: dict[tuple[str, str], list[Played]] = {}
    for file in files[:_FILES]:
        try:
            table = read_samples(file, _EPISODES, _COLUMNS)
        except FileNotFoundError:
            continue  # A live run removes its oldest.
        except EpisodesDamaged as error:
            damaged.append(str(error))
            continue
        newer = set(found)
        for each in _episodes(table, int(file.parent.name)):
            key = each.environment, each.texts[0] if each.texts else ""
            own = found.setdefault(key, [])
            if key not in newer and len(own) < most:
                own.append(each)
    return found


def _episodes(table: pa.Table, iteration: int) -> Iterable[Played]:
    episodes: dict[int, Played] = {}
    for row in table.to_pylist():
        if row.get("role") == OPPONENT_ROLE:
            continue
        number = row["episode_id"]
        if number not in episodes:
            shown = {name: row[name] for name in _SCALARS}
            episodes[number] = Played(iteration, **shown, texts=[], rewards=[])
        episodes[number].texts.extend(map(redact, row["texts"]))
        episodes[number].rewards.extend(row["turn_rewards"])
    return episodes.values()
