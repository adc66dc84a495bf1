"""New scores for episodes that a run has kept: `rescored/LABEL.parquet` in its directory.

Nothing else of the run changes. One row per episode: `iteration`, `episode_id`, `group_id`,
`prompt_id`, `environment`, `reward` (float64, as the run's stages made it; null where it could not
be scored), `score` (float64, the function's; null where it failed) and `failure` (text, or empty).
Functions get texts as they were kept, with what the redactor took out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from earl_core.config import ConfigError, RunConfig
from earl_core.experience.scoring import Scorer, readable
from earl_core.run.episodes import NAME, EpisodesDamaged
from earl_core.run.kept_episodes import kept_episodes
from earl_core.system.files import make_directory, writing_atomic

FOLDER = "rescored"

_IDENTITY = ("episode_id", "group_id", "prompt_id", "environment")
_FIELDS = (*_IDENTITY, "finish_reason", "outcome", "scoring")
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.int64()) for name in ("iteration", *_IDENTITY[:3])),
        pa.field("environment", pa.large_string()),
        pa.field("reward", pa.float64()),
        pa.field("score", pa.float64()),
        pa.field("failure", pa.large_string()),
    ]
)
"""Columns of the file."""


class Rescored(NamedTuple):
    """path: of the file. label: the function's. table: what is in it. damaged: why episodes of
    some iterations could not be read."""

    path: Path
    label: str
    table: pa.Table
    damaged: tuple[str, ...]

    @property
    def scored(self) -> int:
        """Of how many episodes there is a score."""
        return len(self.table) - int(self.table["score"].null_count)

    @property
    def failures(self) -> list[str]:
        """Why episodes have no score, those that repeat once."""
        return list(dict.fromkeys(filter(None, self.table["failure"].to_pylist())))

    def agreement(self) -> Agreement:
        """How the scores order the episodes that have both numbers."""
        return Agreement.of(self.table)


class Agreement(NamedTuple):
    """episodes: that have a reward and a score. rank_correlation: Spearman's, ties by their mean
    rank; NaN where either is constant. pairs: of episodes of one group whose rewards differ;
    agreeing: share of these that the scores order alike, a tie of scores counting half; NaN without
    pairs."""

    episodes: int
    rank_correlation: float
    pairs: int
    agreeing: float

    @classmethod
    def of(cls, table: pa.Table) -> Agreement:
        """The agreement over a table of `SCHEMA`."""
        both = table.select(["iteration", "group_id", "reward", "score"]).drop_null()
        reward, score = both["reward"].to_numpy(), both["score"].to_numpy()
        if len(both) < 2 or np.ptp(reward) == 0 or np.ptp(score) == 0:
            correlation = float("nan")
        else:
            correlation = float(np.corrcoef(_ranks(reward), _ranks(score))[0, 1])
        pairs, agreeing = 0, 0.0
        keys = np.stack([both["iteration"].to_numpy(), both["group_id"].to_numpy()], axis=1)
        _, group = np.unique(keys, axis=0, return_inverse=True)
        for number in range(group.max(initial=-1) + 1):
            old, new = reward[group == number], score[group == number]
            above = np.sign(old[:, None] - old[None]) > 0
            pairs += int(above.sum())
            agreeing += float(((np.sign(new[:, None] - new[None]) + 1) / 2)[above].sum())
        return cls(len(both), correlation, pairs, agreeing / pairs if pairs else float("nan"))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values with the mean of theirs, float64."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(count)
    return ((ends - 1 + ends - count) / 2)[place]


async def rescore(run: Path, config: RunConfig) -> Rescored:
    """Score all kept episodes of a run by the one reward function of `config`.

    An episode that it fails on is named in the file, and the others go on. Raises `ConfigError`
    where there are no episodes, or no scores can be had of the function at all, `EpisodesDamaged`
    where none can be read, and `OSError`.
    """
    (function,) = config.reward.functions
    if function.comes_later:
        raise ConfigError(
            f"{function.function} waits for scores that come later: name a function that gives them"
        )
    files = sorted(run.glob(f"iterations/[0-9]*/{NAME}"))
    if not files:
        raise ConfigError(
            f"{run} has kept no episodes: they are kept under tracking.keep_episodes, the newest "
            "tracking.keep_episodes_bytes of them"
        )
    # As far as scores go: the file says which episodes failed.
    reward = config.reward.model_copy(update={"max_failed_share": 1.0})
    tables, damaged = [], []
    with TemporaryDirectory() as scratch:
        settings = config.model_copy(update={"reward": reward})
        scorer = Scorer(settings, Path(scratch) / "rescore.log", Path(scratch))
        try:
            for file in files:
                try:
                    episodes = list(readable_episodes(file))
                except EpisodesDamaged as error:
                    damaged.append(str(error))
                    continue
                tables.append(await _scored(scorer, int(file.parent.name), episodes))
        finally:
            await scorer.close()
    if not tables:
        raise EpisodesDamaged(f"no kept episodes of {run} can be read: {damaged[0]}")
    table = pa.concat_tables(tables)
    path = run / FOLDER / f"{function.title}.parquet"
    make_directory(path.parent)
    with writing_atomic(path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as stream:
        pq.write_table(table, stream, compression="zstd", write_page_checksum=True)
    return Rescored(path, function.title, table, tuple(damaged))


async def _scored(scorer: Scorer, iteration: int, episodes: list[dict[str, Any]]) -> pa.Table:
    # One more than there are: that all of them fail is no reason to give up either.
    asked = [{k: v for k, v in each.items() if k != "given"} for each in episodes]
    scores = await scorer.score(asked, len(episodes) + 1)
    rows = []
    for each in episodes:
        number = each["episode_id"]
        given = scores.given.get(number)
        rows.append(
            {
                "iteration": iteration,
                **{name: each[name] for name in _IDENTITY},
                "reward": each["given"],
                "score": None if given is None else next(iter(given.values()), None),
                "failure": scores.failures.get(number, ""),
            }
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def readable_episodes(file: Path, *more: str) -> Iterator[dict[str, Any]]:
    """The episodes of a file as reward functions get them, the reward that was `given`, and `more`
    fields. Raises as `kept_episodes`."""
    fields = (*_FIELDS, *more)
    for each in kept_episodes(file, None, (*fields, "shared_reward", "reward")).episodes:
        told = {name: each[name] for name in (*fields, "turn_rewards")}
        shared, given = each["shared_reward"], each["reward"]
        yield readable({**told, "shared": shared, "given": given, "said": each["texts"]})


def run_rescore(run: Path, config: RunConfig) -> Rescored:
    """`rescore`, to its end."""
    return asyncio.run(rescore(run, config))
