"""The turns of a batch in the order of time, whatever samples they stand in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from earl_core.algorithms.moments import Int64Array
from earl_core.dispatch.reads.batch import Batch

NUMBERS, ANCHORS = "turn_numbers", "turn_anchors"


@dataclass(frozen=True)
class PlayedTurns:
    """N turns of some rows, in the rows' order; all int64 [N].

    episodes: index of each one's episode. tokens: how many were sampled. numbers: those that tell
    their order in the episode. anchors: of what was observed; equal ones in one group are the same.
    """

    episodes: Int64Array
    tokens: Int64Array
    numbers: Int64Array
    anchors: Int64Array

    @classmethod
    def of(cls, batch: Batch, rows: np.ndarray, episodes: np.ndarray) -> PlayedTurns:
        """rows: indices into the batch, ascending. episodes: of each row.

        Shards that an older version wrote have neither numbers nor anchors: their turns are in the
        order of the samples, and what they observed is the tokens that were given in them.
        """
        known = set(batch.names())
        of_turns, tokens, numbers, anchors = [], [], [], []
        for row, episode in zip(rows.tolist(), episodes.tolist(), strict=True):
            starts = batch.row("turn_starts", row).astype(np.int64)
            mask = batch.row("loss_mask", row)
            sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
            ends = np.append(starts[1:], len(mask))
            sampled = sums[ends] - sums[starts]
            of_turns.append(np.full(len(starts), episode))
            tokens.append(sampled)
            if NUMBERS in known:
                numbers.append(batch.row(NUMBERS, row).astype(np.int64))
            else:
                numbers.append(np.zeros(len(starts), np.int64))
            if ANCHORS in known:
                anchors.append(batch.row(ANCHORS, row).astype(np.int64))
            else:
                given = zip(starts.tolist(), (ends - sampled).tolist(), strict=True)
                said = batch.row("tokens", row)
                keys = [hash(said[start:end].tobytes()) for start, end in given]
                anchors.append(np.array(keys, np.int64))
        joined = (_joined(each) for each in (of_turns, tokens, numbers, anchors))
        return cls(*joined)

    @cached_property
    def order(self) -> Int64Array:
        """Order of the turns by episode and time, [N]."""
        return np.lexsort((self.numbers, self.episodes)).astype(np.int64)

    @property
    def token_order(self) -> Int64Array:
        """Order of all their sampled tokens by episode and time; within a turn as sampled."""
        counts = self.tokens[self.order]
        first = (np.cumsum(self.tokens) - self.tokens)[self.order]
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.asarray(np.repeat(first, counts) + inside, np.int64)

    @property
    def last(self) -> tuple[Int64Array, Int64Array]:
        """The episodes that have turns, ascending, and the last turn of each."""
        ordered = self.episodes[self.order]
        ends = np.flatnonzero(np.diff(ordered, append=-1))
        return ordered[ends], self.order[ends]


def _joined(parts: list[np.ndarray]) -> Int64Array:
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)
