"""The recorded episodes of `benchmarks.update`, and long conversations made of their turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from earl_core.algorithms.advantage_batch import Episodes, token_advantages
from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS

EPISODES = Path(__file__).parent / "data" / "episodes.parquet"
"""One iteration of the recipe demo, recorded by `tools.record_episodes`."""


@dataclass(frozen=True)
class RecordedEpisode:
    """One sample of L tokens: int32 tokens, uint8 loss_mask, float32 rollout_logprobs and
    advantages, all [L]; turn_starts: first token of each turn; reward of its episode."""

    episode_id: int
    group_id: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    turn_starts: tuple[int, ...]
    reward: float

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(self.loss_mask.argmax())

    def turns(self) -> Iterator[slice]:
        """The token range of each turn."""
        stops = (*self.turn_starts[1:], len(self))
        for start, stop in zip(self.turn_starts, stops, strict=True):
            yield slice(start, stop)


_DTYPES = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "rollout_logprobs": np.float32,
    "advantages": np.float32,
}


def read_episodes(file: Path = EPISODES) -> list[RecordedEpisode]:
    """All recorded episodes, in their order."""
    return [_episode(row) for row in pyarrow.parquet.read_table(file).to_pylist()]


def _episode(row: Mapping[str, Any]) -> RecordedEpisode:
    return RecordedEpisode(
        episode_id=row["episode_id"],
        group_id=row["group_id"],
        turn_starts=tuple(row["turn_starts"]),
        reward=row["reward"],
        **{name: np.array(row[name], dtype=dtype) for name, dtype in _DTYPES.items()},
    )


def conversations(
    episodes: list[RecordedEpisode], tokens: int, count: int
) -> list[RecordedEpisode]:
    """`count` conversations of at least `tokens` tokens: recorded turns, one after another.

    Each begins at another recorded episode and goes on with the following ones, from the first
    again after the last; it ends with the first turn that reaches the length. They form one group.
    """
    made = []
    for number in range(count):
        first = number * len(episodes) // count
        parts: list[tuple[RecordedEpisode, slice]] = []
        length = 0
        for episode in islice(cycle(episodes), first, None):
            for turn in episode.turns():
                parts.append((episode, turn))
                length += turn.stop - turn.start
                if length >= tokens:
                    break
            if length >= tokens:
                break
        columns = {
            name: np.concatenate([getattr(episode, name)[turn] for episode, turn in parts])
            for name in _DTYPES
        }
        starts = np.cumsum([0, *(turn.stop - turn.start for _, turn in parts[:-1])])
        made.append(
            RecordedEpisode(
                episode_id=number,
                group_id=0,
                turn_starts=tuple(starts.tolist()),
                reward=float(number % 2),
                **columns,
            )
        )
    return made


def kept_episodes(file: Path) -> list[RecordedEpisode]:
    """The samples of a run's iteration, which it keeps as `episodes.parquet`. advantages: each
    episode's reward less the mean of its group, on its trained tokens."""
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row["reward"])
    made = []
    for row in rows:
        mask = np.array(row["loss_mask"], np.uint8)
        rewards = groups[row["group_id"]]
        advantages = np.float32(row["reward"] - sum(rewards) / len(rewards)) * mask
        made.append(_episode({**row, "advantages": advantages}))
    return made


def workload(tokens: int | None, count: int, estimator: str | None = None) -> list[RecordedEpisode]:
    """`count` recorded episodes as they are, or conversations of `tokens` tokens made of them.
    estimator: gives the advantages anew, from the rewards; None: those that were recorded."""
    episodes = read_episodes()
    made = episodes[:count] if tokens is None else conversations(episodes, tokens, count)
    return made if estimator is None else with_advantages(made, estimator)


def with_advantages(episodes: list[RecordedEpisode], estimator: str) -> list[RecordedEpisode]:
    """Return the episodes with the advantages that an estimator of groups gives their rewards."""
    groups = np.array([episode.group_id for episode in episodes])
    flat = Episodes.checked(
        np.array([episode.reward for episode in episodes]),
        groups,
        np.ones(len(episodes), dtype=np.int64),
    )
    values = token_advantages(ADVANTAGE_ESTIMATORS.build(estimator), flat, None)
    return [
        replace(episode, advantages=np.float32(value) * episode.loss_mask.astype(np.float32))
        for episode, value in zip(episodes, values, strict=True)
    ]
