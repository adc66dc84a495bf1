"""Samples that add nothing to a gradient, because their advantage is 0 at every trained token.

Under a loss that is a multiple of the advantage (`PolicyLoss.zero_without_advantage`), with no KL
and no entropy in it, such samples count in the denominators of their minibatch and nowhere else. So
they are left out once each rank knows how many trained tokens they have. Some of them, drawn by
seed, are computed all the same, so that the metrics that do not depend on advantages, mismatch and
entropy above all, see episodes of every kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from earl_core.dispatch import Batch
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.parts import ROLE, part_ids

ADVANTAGES = ("advantages", "loss_mask", "episode_id", "group_id", ROLE)
"""Columns that tell which samples add nothing."""

_MEASURED_SHARE = 0.05
"""Part of the samples without advantage that is computed all the same: thousands of tokens in a
batch of a usual size, and a cost that hardly shows."""


@dataclass(frozen=True)
class Skipped:
    """Samples of an update that no rank computes. table: int64 [rows, 4], rows of `sample_table`.
    tokens: of all of them together."""

    table: np.ndarray = field(default_factory=lambda: np.empty((0, 4), dtype=np.int64))
    tokens: int = 0

    @property
    def trained(self) -> int:
        """Trained tokens of all of them together."""
        return int(self.table[:, 3].sum())


def advantage_table(batch: Batch) -> np.ndarray:
    """Tabulate what `choose` needs, int64 [rows, 6]: `sample_table`'s four columns, 1 where a
    trained token has an advantage other than 0, and all tokens."""
    episodes, groups = part_ids(batch), batch.scalars("group_id")
    return _table(
        (id_, group, episode, batch.row("loss_mask", row), batch.row("advantages", row))
        for row, (id_, group, episode) in enumerate(zip(batch.rows, groups, episodes, strict=True))
    )


def leave_out(
    samples: Sequence[TrainingSample], *, whole_episodes: bool, seed: int, iteration: int
) -> tuple[list[TrainingSample], Skipped]:
    """Divide the samples, which are those of all ranks, into the computed ones and the others."""
    table = _table(
        (each.sample_id, each.group_id, each.episode_id, each.loss_mask, each.advantages)
        for each in samples
    )
    skipped = choose(table, whole_episodes=whole_episodes, seed=seed, iteration=iteration)
    out = set(skipped.table[:, 0].tolist())
    return [each for each in samples if each.sample_id not in out], skipped


def choose(table: np.ndarray, *, whole_episodes: bool, seed: int, iteration: int) -> Skipped:
    """Choose the samples that are left out.

    table: `advantage_table` of all ranks' samples. whole_episodes: an episode's samples stay
    together, because their losses depend on each other. The choice depends on the arguments only,
    in whatever order the rows stand.
    """
    units = table[:, 2 if whole_episodes else 0]
    without = ~np.isin(units, units[table[:, 4] != 0])
    candidates = np.unique(units[without & (table[:, 3] > 0)]).tolist()

    def draw(unit: int) -> tuple[int, int]:
        text = f"zero advantage|{seed}|{iteration}|{unit}"
        return xxhash.xxh3_64_intdigest(text.encode()), unit

    measured = sorted(candidates, key=draw)[: math.ceil(_MEASURED_SHARE * len(candidates))]
    out = table[without & ~np.isin(units, measured)]
    return Skipped(out[:, :4], int(out[:, 5].sum()))


def _table(rows: Iterable[tuple[int, int, int, np.ndarray, np.ndarray | None]]) -> np.ndarray:
    found = []
    for sample, group, episode, mask, advantages in rows:
        assert advantages is not None
        trained = advantages[mask.astype(bool, copy=False)]
        found.append((sample, group, episode, trained.size, trained.any(), len(mask)))
    return np.array(found, dtype=np.int64).reshape(-1, 6)
