"""The advantage stage: an episode's advantage goes to all trained tokens of all its samples."""

from __future__ import annotations

import numpy as np

from earl_core.algorithms.advantage_batch import compute_advantages
from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.batch_filter import filter_episodes
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.dispatch.batch import Batch
from earl_core.trajectory.samples import Columns, ListColumn


class NothingToTrain(RuntimeError):
    """Every group of the batch was dropped."""


def advantage_columns(batch: Batch, algorithm: AlgorithmConfig) -> tuple[Columns, dict[str, float]]:
    """Columns of `ADVANTAGE_SCHEMA` for the samples that are trained on, and metrics.

    Groups with fewer than two episodes are dropped and counted if the estimator compares the
    episodes of a group. With KL in the reward, each trained token pays the coefficient times the
    estimate of KL(policy || reference) under the log-probs it was sampled with.
    """
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    episode_of_row = batch.scalars("episode_id")
    episodes, first_row, inverse = np.unique(episode_of_row, return_index=True, return_inverse=True)
    groups = batch.scalars("group_id")[first_row]
    kept = filter_episodes(
        groups, np.zeros(len(episodes), dtype=bool), group_relative=estimator.needs_groups
    )
    if not kept.keep.any():
        raise NothingToTrain(
            "no group has two episodes left, so no advantage can be computed: look at the "
            "rollout's failed episodes, or raise rollout.group_size"
        )
    rows = np.flatnonzero(kept.keep[inverse])
    trained = [np.flatnonzero(batch.row("loss_mask", int(row))) for row in rows]
    # Rows are sorted by sample_id, so the samples of an episode are neighbours and in order.
    local = np.cumsum(kept.keep) - 1
    counts = np.bincount(
        local[inverse[rows]], weights=[len(t) for t in trained], minlength=int(kept.keep.sum())
    ).astype(np.int64)
    rewards = batch.scalars("reward")[first_row][kept.keep].astype(np.float64)
    result = compute_advantages(
        estimator, rewards, groups[kept.keep], counts, _penalties(batch, rows, trained, algorithm)
    )
    metrics = {**kept.metrics(), **_metrics(result.tokens())}
    return _scatter(batch, rows, trained, result.tokens()), metrics


def _penalties(
    batch: Batch, rows: np.ndarray, trained: list[np.ndarray], algorithm: AlgorithmConfig
) -> np.ndarray | None:
    if algorithm.kl.placement != "reward":
        return None
    estimator = KL_ESTIMATORS.build(algorithm.kl.estimator)
    parts = [
        estimator.values(
            batch.row("rollout_logprobs", int(row))[at].astype(np.float64),
            batch.row("reference_logprobs", int(row))[at].astype(np.float64),
        )
        for row, at in zip(rows, trained, strict=True)
    ]
    return algorithm.kl.coefficient * np.concatenate(parts)


def _scatter(
    batch: Batch, rows: np.ndarray, trained: list[np.ndarray], values: np.ndarray
) -> Columns:
    lengths = [len(batch.row("tokens", int(row))) for row in rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    flat = np.zeros(int(offsets[-1]), dtype=np.float32)
    start = 0
    for offset, at in zip(offsets[:-1], trained, strict=True):
        flat[offset + at] = values[start : start + len(at)]
        start += len(at)
    return {"sample_id": batch.rows[rows].copy(), "advantages": ListColumn(flat, offsets)}


def _metrics(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {"mean": 0.0, "std": 0.0, "nonzero_share": 0.0}
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "nonzero_share": float((values != 0).mean()),
    }
