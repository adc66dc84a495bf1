"""The advantage stage: an episode's advantage goes to all trained tokens of all its samples.

Each rank works on whole groups of its own, in two steps: `advantage_statistics` says what the
other ranks must know of its episodes, `advantage_rows` takes the merged statistics of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from earl_core.algorithms.advantage_batch import (
    BatchStatistics,
    apply_statistics,
    local_statistics,
)
from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from earl_core.algorithms.batch_filter import filter_episodes
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.cluster.results import Rule
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.dispatch.reads.batch import Batch
from earl_core.experience.statistics import RankStatistics
from earl_core.trajectory.samples import ColumnTarget

# A mean over several ranks ends in other last bits than one over all: below this is no advantage.
_ROUNDING = 1e-6

ADVANTAGE_RULES: dict[str, Rule] = {
    "mean": "mean",
    "std": "std",
    "nonzero_share": "mean",
    "kl_bounded_share": "mean",
    "episodes_kept": "sum",
    # A group is whole on one rank, so none is counted twice.
    "groups_dropped": "sum",
    "episodes_dropped_with_group": "sum",
    "seconds": "max",
}
"""How the metrics of several ranks become one; their weight is their number of trained tokens."""


def advantage_statistics(batch: Batch, algorithm: AlgorithmConfig) -> RankStatistics:
    """What other ranks must know of this rank's episodes: never a reward, never a group's mean."""
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    if not len(batch):
        return RankStatistics(0, None)
    part = _Part.of(batch, algorithm, estimator)
    if not estimator.needs_batch:
        return RankStatistics(len(part.rewards), None)
    return RankStatistics(len(part.rewards), part.statistics(estimator).batch)


class AdvantageRows:
    """Rows of `ADVANTAGE_SCHEMA`: the advantages of trained tokens, 0 on all others.

    sample_ids: int64 [rows], ascending. trained: the trained positions of each row.
    advantages: float [trained tokens], row after row.
    """

    def __init__(
        self,
        sample_ids: np.ndarray,
        lengths: np.ndarray,
        trained: list[np.ndarray],
        advantages: np.ndarray,
    ) -> None:
        self.lengths = {"advantages": lengths}
        self.strings: dict[str, list[str]] = {}
        self._sample_ids = sample_ids
        self._trained = trained
        self._advantages = advantages

    def __len__(self) -> int:
        return len(self._sample_ids)

    def fill(self, target: ColumnTarget) -> None:
        """Write both columns."""
        target.values("sample_id")[:] = self._sample_ids
        flat = target.values("advantages")
        flat[:] = 0.0
        first = read = 0
        for length, at in zip(self.lengths["advantages"].tolist(), self._trained, strict=True):
            flat[first + at] = self._advantages[read : read + len(at)]
            first, read = first + length, read + len(at)


def advantage_rows(
    batch: Batch, algorithm: AlgorithmConfig, statistics: RankStatistics
) -> tuple[AdvantageRows, dict[str, float], int]:
    """Advantages of the samples that are trained on, metrics, and the number of trained tokens
    they are over.

    `statistics` are those of all ranks together; the groups of the batch's episodes are whole in
    it. Groups with fewer than two episodes are dropped and counted if the estimator compares the
    episodes of a group. With KL in the reward, each trained token pays the coefficient times the
    estimate of KL(policy || reference) under the log-probs it was sampled with.
    """
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    part = _Part.of(batch, algorithm, estimator)
    known = BatchStatistics(part.statistics(estimator).groups, statistics.batch)
    values = apply_statistics(
        estimator, known, part.rewards, part.groups, part.counts, part.penalties
    )
    # A group that is dropped has one episode.
    dropped = float(part.dropped)
    metrics = {
        "episodes_kept": float(len(part.rewards)),
        "groups_dropped": dropped,
        "episodes_dropped_with_group": dropped,
        **_metrics(values),
        **part.penalty_metrics,
    }
    lengths = np.array([len(batch.row("tokens", int(row))) for row in part.rows], dtype=np.int64)
    rows = AdvantageRows(batch.rows[part.rows], lengths, part.trained, values)
    return rows, metrics, len(values)


@dataclass(frozen=True)
class _Part:
    """The episodes of a batch that are trained on, in the layout of `advantage_batch`.

    dropped: how many episodes leave. rows: indices into the batch of the others' samples; trained:
    the trained positions of each.
    """

    dropped: int
    rows: np.ndarray
    trained: list[np.ndarray]
    rewards: np.ndarray
    groups: np.ndarray
    counts: np.ndarray
    penalties: np.ndarray | None
    penalty_metrics: dict[str, float]

    @classmethod
    def of(cls, batch: Batch, algorithm: AlgorithmConfig, estimator: AdvantageEstimator) -> _Part:
        episodes, first_row, inverse = np.unique(
            batch.scalars("episode_id"), return_index=True, return_inverse=True
        )
        groups = batch.scalars("group_id")[first_row]
        keep = filter_episodes(groups, group_relative=estimator.needs_groups)
        kept = int(keep.sum())
        rows = np.flatnonzero(keep[inverse])
        trained = [np.flatnonzero(batch.row("loss_mask", int(row))) for row in rows]
        # Rows are sorted by sample_id, so the samples of an episode are neighbours and in order.
        local = np.cumsum(keep) - 1
        counts = np.bincount(
            local[inverse[rows]],
            weights=[len(positions) for positions in trained],
            minlength=kept,
        )
        penalties, penalty_metrics = _penalties(batch, rows, trained, algorithm)
        return cls(
            dropped=len(episodes) - kept,
            rows=rows,
            trained=trained,
            rewards=batch.scalars("reward")[first_row][keep].astype(np.float64),
            groups=groups[keep],
            counts=counts.astype(np.int64),
            penalties=penalties,
            penalty_metrics=penalty_metrics,
        )

    def statistics(self, estimator: AdvantageEstimator) -> BatchStatistics:
        return local_statistics(estimator, self.rewards, self.groups, self.counts, self.penalties)


def _penalties(
    batch: Batch, rows: np.ndarray, trained: list[np.ndarray], algorithm: AlgorithmConfig
) -> tuple[np.ndarray | None, dict[str, float]]:
    """What each trained token pays, and the share of them that pay the estimator's bound."""
    if algorithm.kl.placement != "reward":
        return None, {}
    estimator = KL_ESTIMATORS.build(algorithm.kl.estimator)

    def joined(name: str) -> np.ndarray:
        parts = [batch.row(name, int(row))[at] for row, at in zip(rows, trained, strict=True)]
        return np.concatenate([np.empty(0), *parts])

    both = joined("rollout_logprobs"), joined("reference_logprobs")
    bounded = estimator.bounded(*both)
    metrics = {}
    if bounded is not None:
        metrics["kl_bounded_share"] = float(bounded.mean()) if bounded.size else 0.0
    return algorithm.kl.coefficient * estimator.values(*both), metrics


def _metrics(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {"mean": 0.0, "std": 0.0, "nonzero_share": 0.0}
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "nonzero_share": float((np.abs(values) > _ROUNDING).mean()),
    }
