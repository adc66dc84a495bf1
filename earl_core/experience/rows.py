"""Which rows each rank of the `experience` group works on."""

from __future__ import annotations

import numpy as np

from earl_core.dispatch import Batch, Manifest, ShardStore
from earl_core.dispatch.reads.layout import Layout
from earl_core.dispatch.reads.plan import make_plan
from earl_core.dispatch.reads.sources import sample_ids
from earl_core.trajectory.schema import SAMPLE_BITS


def rows_of_rank(
    store: ShardStore, rollout: Manifest, rank: int, ranks: int, *, whole_groups: bool
) -> np.ndarray:
    """sample_id of the rank's rows, int64, in order; empty when there are fewer units than ranks.

    An episode is whole on one rank, and with `whole_groups` so is a group, because then its
    moments need not leave the rank. Every stage that asks for the same gets the same rows, so
    that an advantage is computed where its reward was.
    """
    ids = sample_ids(rollout)
    if ranks == 1:
        return ids
    units = _groups(store, rollout) if whole_groups else ids >> SAMPLE_BITS
    layout = Layout(data_parallel=ranks, keep_groups=True)
    return make_plan([rollout], layout, groups=units).rows(rank)


def _groups(store: ShardStore, rollout: Manifest) -> np.ndarray:
    with Batch(store, [rollout]) as batch:
        return batch.scalars("group_id")
