"""Successes of the rows that an iteration has played, which a curriculum learns from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from earl_core.config.environment import RowCurriculumConfig
from earl_core.dispatch.reads.batch import Batch
from earl_core.trajectory.samples import Rows

RowResults = dict[str, list[list[int]]]
"""By the label of an environment: for each prompt, ascending, [prompt, successes, episodes]."""

_ROUNDED = 1e-6


def row_results(
    batch: Batch, rewarded: Rows, curricula: Mapping[str, RowCurriculumConfig], old: Collection[int]
) -> RowResults:
    """Count the rewarded episodes of the environments that have a curriculum. rewarded: as of
    `reward_rows`. old: groups that were counted in an earlier iteration."""
    if not curricula:
        return {}
    rows = np.searchsorted(batch.rows, np.asarray(rewarded.numbers["sample_id"]))
    _, first = np.unique(batch.scalars("episode_id")[rows], return_index=True)
    rewards = np.asarray(rewarded.numbers["reward"])[first].tolist()
    labels, places = batch.strings("environment"), rows[first]
    columns = (batch.scalars(name)[places].tolist() for name in ("group_id", "prompt_id"))
    found = []
    for row, group, prompt, reward in zip(places.tolist(), *columns, rewards, strict=True):
        label = labels[row]
        if label in curricula and group not in old:
            solved = passes(reward, curricula[label].passing_reward)
            found.append({label: [[prompt, int(solved), 1]]})
    return merge_rows(found)


def passes(reward: float, passing: float) -> bool:
    """Tell whether an episode is a success, but for rounding: a reward is a sum of float32 by
    weights, and 0.7 + 0.2 + 0.1 is less than 1."""
    return reward >= passing - _ROUNDED * max(1.0, abs(passing))


def merge_rows(parts: Iterable[Mapping[str, list[list[int]]]]) -> RowResults:
    """Add up the counts of several parts."""
    whole: dict[str, dict[int, list[int]]] = {}
    for part in parts:
        for label, results in part.items():
            counts = whole.setdefault(label, {})
            for prompt, solved, episodes in results:
                count = counts.setdefault(prompt, [0, 0])
                count[0] += solved
                count[1] += episodes
    return {
        label: [[prompt, *counts[prompt]] for prompt in sorted(counts)]
        for label, counts in sorted(whole.items())
    }
