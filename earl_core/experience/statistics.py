"""What the ranks tell each other about their episodes before they compute advantages.

A rank sends how many of its episodes are trained on and, where the estimator needs it, the
batch's count, mean and M2 over them. Groups are whole on one rank, so their moments stay there,
and no rank sees another's rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from pydantic import BaseModel

from earl_core.algorithms.moments import Moments
from earl_core.system.errors import EarlError


class RankStatistics(BaseModel):
    """`episodes`: trained on. `batch`: their float64 moments; None if the estimator needs none."""

    episodes: int
    batch: Moments | None = None


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One dumped `RankStatistics`, merged in rank order, so that all ranks get the same bits.

    Raises `EarlError` when no rank has an episode to train on.
    """
    ranks = [RankStatistics.model_validate(part) for part in parts]
    episodes = sum(rank.episodes for rank in ranks)
    if not episodes:
        raise EarlError(
            "no group has two episodes left, so no advantage can be computed: look at the "
            "rollout's failed episodes, or raise rollout.group_size"
        )
    known = [rank.batch for rank in ranks if rank.batch is not None]
    batch = reduce(Moments.merge, known) if known else None
    return RankStatistics(episodes=episodes, batch=batch).model_dump()
