"""The advantage stage: an episode's advantage goes to all trained tokens of all its samples, a
turn's to those of the turn.

Each rank works on whole groups of its own, in two steps: `advantage_statistics` says what the
other ranks must know of its episodes, `advantage_rows` takes the merged statistics of all. A rank
sends how many of its episodes are trained on and, where the estimator needs it, the batch's count,
mean and M2 over them; no rank sees another's rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from earl_core.algorithms.advantage_batch import (
    Episodes,
    batch_moments,
    filter_episodes,
    token_advantages,
)
from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.moments import RankStatistics
from earl_core.algorithms.turns import Turns
from earl_core.cluster.rpc import Rule
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.dispatch.reads.batch import Batch
from earl_core.run.worker import READ_RULES
from earl_core.trajectory.samples import Rows

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
    **READ_RULES,
}
"""How the metrics of several ranks become one; their weight is their number of trained tokens."""


def advantage_statistics(batch: Batch, algorithm: AlgorithmConfig) -> RankStatistics:
    """What other ranks must know of this rank's episodes: never a reward, never a group's mean."""
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    if not len(batch):
        return RankStatistics(episodes=0)
    episodes = _Part.of(batch, algorithm, estimator).episodes
    moments = batch_moments(estimator, episodes)
    groups = len(np.unique(batch.scalars("group_id"))) if estimator.needs_groups else None
    return RankStatistics(episodes=len(episodes.rewards), batch=moments, groups=groups)


def advantage_rows(
    batch: Batch, algorithm: AlgorithmConfig, statistics: RankStatistics
) -> tuple[Rows, dict[str, float], int]:
    """Rows of `ADVANTAGE_SCHEMA` for the samples that are trained on (0 on tokens that are not),
    metrics, and the number of trained tokens they are over.

    `statistics` are those of all ranks together; the groups of the batch's episodes are whole in
    it. Groups with fewer than two episodes are dropped and counted if the estimator compares the
    episodes of a group. With KL in the reward, each trained token pays the coefficient times the
    estimate of KL(policy || reference) under the log-probs it was sampled with.
    """
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    part = _Part.of(batch, algorithm, estimator)
    values = token_advantages(estimator, part.episodes, statistics.batch)
    # A group that is dropped has one episode.
    dropped = float(part.dropped)
    metrics = {
        "episodes_kept": float(len(part.episodes.rewards)),
        "groups_dropped": dropped,
        "episodes_dropped_with_group": dropped,
        **_metrics(values),
        **part.penalty_metrics,
    }
    lengths = np.array([len(batch.row("tokens", int(row))) for row in part.rows], dtype=np.int64)
    of_row = np.split(values, np.cumsum([len(at) for at in part.trained])[:-1])
    whole = map(_scattered, lengths.tolist(), part.trained, of_row)
    columns = {"sample_id": batch.rows[part.rows], "advantages": whole}
    return Rows(columns, {"advantages": lengths}), metrics, len(values)


def _scattered(length: int, places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float32 [length]: the values at their places, 0 elsewhere."""
    row = np.zeros(length, dtype=np.float32)
    row[places] = values
    return row


@dataclass(frozen=True)
class _Part:
    """The episodes of a batch that are trained on.

    dropped: how many episodes leave. rows: indices into the batch of the others' samples; trained:
    the trained positions of each.
    """

    dropped: int
    rows: np.ndarray
    trained: list[np.ndarray]
    episodes: Episodes
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
        rewards = batch.scalars("reward")[first_row][keep]
        turns = None
        if estimator.turn_level:
            turns = _turns(batch, rows, local[inverse[rows]])
        return cls(
            dropped=len(episodes) - kept,
            rows=rows,
            trained=trained,
            episodes=Episodes.checked(rewards, groups[keep], counts, penalties, turns),
            penalty_metrics=penalty_metrics,
        )


def _turns(batch: Batch, rows: np.ndarray, episodes: np.ndarray) -> Turns:
    """Of these rows, each of the given episode. What a turn answered is the tokens given in it."""
    groups = batch.scalars("group_id")
    rewards, index, counts, anchors = [], [], [], []
    for row, episode in zip(rows.tolist(), episodes.tolist(), strict=True):
        tokens, mask = batch.row("tokens", row), batch.row("loss_mask", row)
        starts = batch.row("turn_starts", row).astype(np.int64)
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            sampled = int(mask[start:end].sum())
            counts.append(sampled)
            anchors.append((int(groups[row]), tokens[start : end - sampled].tobytes()))
        rewards.append(batch.row("turn_totals", row).astype(np.float64))
        index += [episode] * len(starts)
    joined = np.concatenate([np.empty(0), *rewards])
    return Turns.checked(joined, index, counts, anchors)


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
