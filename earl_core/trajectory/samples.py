"""From played turns to samples and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from earl_core.trajectory.schema import ROLLOUT_SCHEMA, SAMPLE_BITS


@dataclass(frozen=True)
class ListColumn:
    """A `large_list` column: flat values and int64 offsets of length rows + 1."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[float] | np.ndarray], dtype: str) -> ListColumn:
        """Concatenate one sequence per row."""
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        values = np.empty(int(offsets[-1]), dtype=dtype)
        for row, start, stop in zip(rows, offsets[:-1], offsets[1:], strict=True):
            values[start:stop] = row
        return cls(values, offsets)


Columns = dict[str, "np.ndarray | ListColumn | list[str]"]


@dataclass
class Sample:
    """One token stream of an episode, appended to as the episode goes on."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    policy_version_first: list[int] = field(default_factory=list)
    policy_version_last: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)

    def begin_turn(self, observation: Sequence[int]) -> None:
        """Append a turn's given tokens (prompt, environment, template, prefix)."""
        self.turn_starts.append(len(self.tokens))
        self.policy_version_first.append(-1)
        self.policy_version_last.append(-1)
        self.turn_rewards.append(0.0)
        self.tokens.extend(observation)
        self.loss_mask.extend([0] * len(observation))
        self.rollout_logprobs.extend([0.0] * len(observation))

    def answer(self, tokens: Sequence[int], logprobs: Sequence[float], policy_version: int) -> None:
        """Append the turn's sampled tokens with their log-probs."""
        self.tokens.extend(tokens)
        self.loss_mask.extend([1] * len(tokens))
        self.rollout_logprobs.extend(logprobs)
        if self.policy_version_first[-1] < 0:
            self.policy_version_first[-1] = policy_version
        self.policy_version_last[-1] = policy_version

    @property
    def trained_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.loss_mask)


@dataclass
class Episode:
    """A whole interaction: its identity, its samples and how it ended."""

    episode_id: int
    group_id: int
    prompt_id: int
    samples: list[Sample] = field(default_factory=list)
    finish_reason: str = ""
    info: dict[str, object] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """Answers given, over all samples."""
        return sum(len(sample.turn_starts) for sample in self.samples)

    @property
    def total_reward(self) -> float:
        """Sum of the turns' rewards."""
        return float(sum(sum(sample.turn_rewards) for sample in self.samples))

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sample."""
        return max((len(sample.tokens) for sample in self.samples), default=0)


def rollout_columns(episodes: Sequence[Episode]) -> Columns:
    """All samples of the episodes as columns of `ROLLOUT_SCHEMA`, sorted by sample_id."""
    ordered = sorted(episodes, key=lambda episode: episode.episode_id)
    rows = [
        (episode.episode_id << SAMPLE_BITS | number, episode, sample)
        for episode in ordered
        for number, sample in enumerate(episode.samples)
    ]
    samples = [sample for _, _, sample in rows]
    columns: Columns = {
        "sample_id": np.array([sample_id for sample_id, _, _ in rows], dtype=np.int64),
        "episode_id": np.array([episode.episode_id for _, episode, _ in rows], dtype=np.int64),
        "group_id": np.array([episode.group_id for _, episode, _ in rows], dtype=np.int64),
        "prompt_id": np.array([episode.prompt_id for _, episode, _ in rows], dtype=np.int64),
        "turns": np.array([len(sample.turn_starts) for sample in samples], dtype=np.int32),
        "finish_reason": [episode.finish_reason for _, episode, _ in rows],
    }
    for name in ROLLOUT_SCHEMA.names[len(columns) :]:
        dtype = ROLLOUT_SCHEMA.field(name).type.value_type.to_pandas_dtype()
        columns[name] = ListColumn.from_rows(
            [getattr(s, name) for s in samples], np.dtype(dtype).str
        )
    return columns
