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


@dataclass(frozen=True)
class SampleTable:
    """What a split needs to know of all ranks' samples, and which of them are this rank's.

    columns: int64 [rows, 4]: sample, group and episode, trained tokens. first, stop: the rows of
    this rank.
    """

    columns: np.ndarray
    first: int
    stop: int

    @classmethod
    def of(cls, samples: Sequence[TrainingSample]) -> SampleTable:
        """The table of these samples alone."""
        columns = np.array(
            [
                (
                    sample.sample_id,
                    sample.group_id,
                    sample.episode_id,
                    np.count_nonzero(sample.loss_mask),
                )
                for sample in samples
            ],
            dtype=np.int64,
        ).reshape(-1, 4)
        return cls(columns, 0, len(samples))

    @classmethod
    def joined(cls, parts: Sequence[np.ndarray], own: int) -> SampleTable:
        """The ranks' columns as one table; `own`: which part is this rank's."""
        first = sum(len(part) for part in parts[:own])
        return cls(np.concatenate(parts), first, first + len(parts[own]))

    def episodes_on_several(self, parts: Sequence[np.ndarray]) -> list[int]:
        """Episodes with samples in more than one of the parts."""
        owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        pairs = np.unique(np.stack([self.columns[:, 2], owners]), axis=1)[0]
        episodes, ranks = np.unique(pairs, return_counts=True)
        return [int(episode) for episode in episodes[ranks > 1]]


def split_table(
    table: SampleTable, count: int, *, seed: int, iteration: int, epoch: int
) -> list[Minibatch]:
    """Cut the samples into at most `count` minibatches of whole groups.

    Groups are put in an order hashed from (seed, iteration, epoch, group), so the split depends
    on nothing else, least of all on which rank has which sample, and are dealt out in equal numbers
    as far as possible. With fewer groups than `count` there are fewer minibatches. Rows keep their
    order inside a minibatch; one without a trained token is left out.
    """
    _, group_ids, episode_ids, trained = table.columns.T
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
            own = rows[(rows >= table.first) & (rows < table.stop)] - table.first
            totals = Totals.from_token_counts(counts.values())
            minibatches.append(Minibatch(tuple(own.tolist()), totals, counts))
    return minibatches
