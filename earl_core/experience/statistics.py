"""What the ranks tell each other about their episodes before they compute advantages.

A rank sends how many of its episodes are trained on and, where the estimator needs it, the
batch's count, mean and M2 over them. Groups are whole on one rank, so their moments stay there,
and no rank sees another's rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earl_core.algorithms.moments import Moments
from earl_core.system.errors import EarlError


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """`episodes`: trained on. `batch`: their float64 moments; None if the estimator needs none."""

    episodes: int
    batch: Moments | None

    def to_json(self) -> dict[str, Any]:
        """A JSON object, to be sent to other ranks; every bit of the floats is kept."""
        batch = None if self.batch is None else self.batch.to_json()
        return {"episodes": self.episodes, "batch": batch}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankStatistics:
        """Inverse of :meth:`to_json`."""
        batch = data["batch"]
        return cls(int(data["episodes"]), None if batch is None else Moments.from_json(batch))


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One `RankStatistics` as JSON, merged in rank order, so that all ranks get the same bits.

    Raises `EarlError` when no rank has an episode to train on.
    """
    ranks = [RankStatistics.from_json(part) for part in parts]
    episodes = sum(rank.episodes for rank in ranks)
    if not episodes:
        raise EarlError(
            "no group has two episodes left, so no advantage can be computed: look at the "
            "rollout's failed episodes, or raise rollout.group_size"
        )
    known = [rank.batch for rank in ranks if rank.batch is not None]
    batch = Moments.merge_all(known) if known else None
    return RankStatistics(episodes, batch).to_json()
