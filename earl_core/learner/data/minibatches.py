"""Which samples each optimizer step sees. Pure functions; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from earl_core.algorithms.aggregation import Totals
from earl_core.learner.data.packing import TrainingSample


@dataclass(frozen=True)
class Minibatch:
    """The samples of one optimizer step.

    rows: indices into the update's samples, those of this rank. totals: its trained tokens, and
    episodes with any, over all ranks. token_counts: trained tokens of each of its episodes over
    all its samples.
    """

    rows: tuple[int, ...]
    totals: Totals
    token_counts: dict[int, int]


def sample_table(samples: Sequence[TrainingSample]) -> np.ndarray:
    """What a split knows of samples, int64 [rows, 4]: sample, group, episode, trained tokens."""
    rows = [
        (each.sample_id, each.group_id, each.episode_id, np.count_nonzero(each.loss_mask))
        for each in samples
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def episodes_on_several(tables: Sequence[np.ndarray]) -> list[int]:
    """Episodes with samples in more than one of the ranks' tables."""
    found, ranks = np.unique(
        np.concatenate([np.unique(table[:, 2]) for table in tables]), return_counts=True
    )
    return [int(episode) for episode in found[ranks > 1]]


def split_table(
    table: np.ndarray, own: range, count: int, *, seed: int, iteration: int, epoch: int
) -> list[Minibatch]:
    """Cut the samples into at most `count` minibatches of whole groups.

    table: `sample_table` of all ranks' samples; own: which of its rows are this rank's.
    Groups are put in an order hashed from (seed, iteration, epoch, group), so the split depends
    on nothing else, least of all on which rank has which sample, and are dealt out in equal numbers
    as far as possible. With fewer groups than `count` there are fewer minibatches. Rows keep their
    order inside a minibatch; one without a trained token is left out.
    """
    _, group_ids, episode_ids, trained = table.T
    groups, group_of_row = np.unique(group_ids, return_inverse=True)

    def draw(index: int) -> tuple[int, int]:
        text = f"minibatch|{seed}|{iteration}|{epoch}|{groups[index]}"
        return xxhash.xxh3_64_intdigest(text.encode()), int(groups[index])

    order = sorted(range(len(groups)), key=draw)
    minibatches = []
    for part in np.array_split(np.array(order, dtype=np.int64), max(1, min(count, len(order)))):
        rows = np.flatnonzero(np.isin(group_of_row, part))
        episodes, episode_of_row = np.unique(episode_ids[rows], return_inverse=True)
        sums = np.bincount(episode_of_row, weights=trained[rows], minlength=len(episodes))
        counts = dict(zip(episodes.tolist(), sums.astype(np.int64).tolist(), strict=True))
        if any(counts.values()):
            mine = rows[(rows >= own.start) & (rows < own.stop)] - own.start
            totals = Totals.from_token_counts(counts.values())
            minibatches.append(Minibatch(tuple(mine.tolist()), totals, counts))
    return minibatches
