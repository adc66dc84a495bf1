"""Which samples each optimizer step sees. Pure functions; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from earl_core.algorithms.aggregation import Totals
from earl_core.learner.packing import TrainingSample


@dataclass(frozen=True)
class Minibatch:
    """The samples of one optimizer step.

    rows: indices into the update's samples. totals: its trained tokens, and episodes with any.
    token_counts: trained tokens of each of its episodes over all its samples.
    """

    rows: tuple[int, ...]
    totals: Totals
    token_counts: dict[int, int]


def split_minibatches(
    samples: Sequence[TrainingSample], count: int, *, seed: int, iteration: int, epoch: int
) -> list[Minibatch]:
    """Cut the samples into at most `count` minibatches of whole groups.

    Groups are put in an order hashed from (seed, iteration, epoch, group), so the split depends
    on nothing else, and are dealt out in equal numbers as far as possible. With fewer groups than
    `count` there are fewer minibatches. Rows keep their order inside a minibatch; one without a
    trained token is left out.
    """
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(row)

    def draw(group_id: int) -> tuple[int, int]:
        text = f"minibatch|{seed}|{iteration}|{epoch}|{group_id}"
        return xxhash.xxh3_64_intdigest(text.encode()), group_id

    order = sorted(groups, key=draw)
    minibatches = []
    for part in np.array_split(np.arange(len(order)), max(1, min(count, len(order)))):
        rows = sorted(row for index in part for row in groups[order[index]])
        counts: dict[int, int] = {}
        for row in rows:
            trained = int(np.count_nonzero(samples[row].loss_mask))
            episode = samples[row].episode_id
            counts[episode] = counts.get(episode, 0) + trained
        if any(counts.values()):
            totals = Totals.from_token_counts(counts.values())
            minibatches.append(Minibatch(tuple(rows), totals, counts))
    return minibatches
