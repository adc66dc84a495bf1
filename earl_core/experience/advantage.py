"""The advantage stage: an episode's advantage goes to all trained tokens of all its samples, a
turn's to those of the turn.

Each rank works on whole groups of its own, in two steps: `advantage_statistics` says what the
other ranks must know of its episodes, `advantage_rows` takes the merged statistics of all. A rank
sends how many of its episodes are trained on and, where the estimator needs it, the batch's count,
mean and M2 over them; no rank sees another's rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from earl_core.config.algorithm import AlgorithmConfig, KLConfig
from earl_core.dispatch.reads.batch import Batch
from earl_core.experience.played_turns import PlayedTurns
from earl_core.experience.roles import Parts, roles_of
from earl_core.run.worker import READ_RULES
from earl_core.trajectory.samples import Rows

# A mean over several ranks ends in other last bits than one over all: below this is no advantage.
_ROUNDING = 1e-6

ADVANTAGE_RULES: dict[str, Rule] = {
    "mean": "mean",
    "std": "std",
    "nonzero_share": "mean",
    "kl_bounded_share": "mean",
    # Every rank tells that of the whole batch.
    "anchored_share": "mean",
    "episodes_kept": "sum",
    # A group is whole on one rank, so none is counted twice.
    "groups_dropped": "sum",
    "episodes_dropped_with_group": "sum",
    "seconds": "max",
    **READ_RULES,
}
"""Rules that merge the metrics of several ranks; their weight is their number of trained tokens."""


Coefficient = Callable[[str], float]
"""The KL coefficient of an environment's episodes, by its label, in this iteration."""


def advantage_statistics(
    batch: Batch, algorithm: AlgorithmConfig, coefficient: Coefficient | None = None
) -> RankStatistics:
    """Compute the statistics that other ranks must know of this rank's episodes: never a reward,
    never a group's mean. coefficient: as of `advantage_rows`."""
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    if not len(batch):
        return RankStatistics(episodes=0)
    parts = _Part.all_of(batch, partial(_penalties, algorithm.kl, coefficient), estimator)
    found = RankStatistics(episodes=_episodes(batch, parts))
    for part in parts:
        moments = batch_moments(estimator, part.episodes)
        if moments is not None and part.environment:
            found.mixture[part.environment] = moments
        elif moments is not None:
            found.batch = moments
    if estimator.needs_groups:
        found.groups = len(np.unique(batch.scalars("group_id")))
    if _compares_turns(estimator):
        turns = [part.episodes.turns for part in parts if part.episodes.turns is not None]
        found.turns = sum(len(each.rewards) for each in turns)
        found.anchored = sum(each.anchored for each in turns)
    return found


def _compares_turns(estimator: AdvantageEstimator) -> bool:
    return estimator.turn_level and not estimator.token_level


def advantage_rows(
    batch: Batch,
    algorithm: AlgorithmConfig,
    statistics: RankStatistics,
    coefficient: Coefficient | None = None,
) -> tuple[Rows, dict[str, float], int]:
    """Rows of `ADVANTAGE_SCHEMA` for the samples that are trained on (0 on tokens that are not),
    metrics, and the number of trained tokens they are over.

    `statistics` are those of all ranks together; the groups of the batch's episodes are whole in
    it. Groups with fewer than two episodes are dropped and counted if the estimator compares the
    episodes of a group. With KL in the reward, each trained token pays the coefficient times the
    estimate of KL(policy || reference) under the log-probs it was sampled with. coefficient: None:
    that of `algorithm.kl`.
    """
    estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
    parts = _Part.all_of(batch, partial(_penalties, algorithm.kl, coefficient), estimator)
    of_row: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for part in parts:
        moments = statistics.of_environment(part.environment)
        of_row |= part.scattered(token_advantages(estimator, part.episodes, moments))
    rows = np.array(sorted(of_row), dtype=np.int64)
    values = np.concatenate([np.empty(0), *(of_row[row][1] for row in rows.tolist())])
    kept = _episodes(batch, parts)
    metrics = {
        "episodes_kept": float(kept),
        # A group that is dropped has one episode, or one role's part of one.
        "groups_dropped": float(sum(part.dropped for part in parts)),
        "episodes_dropped_with_group": float(len(np.unique(batch.scalars("episode_id"))) - kept),
        **_metrics(values),
        **_bounded(parts),
    }
    if _compares_turns(estimator):
        metrics["anchored_share"] = (statistics.anchored or 0) / max(statistics.turns or 0, 1)
    lengths = np.array([len(batch.row("tokens", row)) for row in rows.tolist()], dtype=np.int64)
    whole = (
        _scattered(length, *of_row[row])
        for length, row in zip(lengths.tolist(), rows.tolist(), strict=True)
    )
    columns: dict[str, Iterable[Any]] = {"sample_id": batch.rows[rows], "advantages": whole}
    return Rows(columns, {"advantages": lengths}), metrics, len(values)


def _episodes(batch: Batch, parts: Sequence[_Part]) -> int:
    """Count the episodes of which some part is trained on."""
    rows = np.concatenate([np.empty(0, np.int64), *(part.rows for part in parts)])
    return len(np.unique(batch.scalars("episode_id")[rows]))


def _scattered(length: int, places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float32 [length]: the values at their places, 0 elsewhere."""
    row = np.zeros(length, dtype=np.float32)
    row[places] = values
    return row


Charge = Callable[
    [Batch, np.ndarray, list[np.ndarray]], tuple[np.ndarray | None, np.ndarray | None]
]
"""(batch, rows, their trained positions) → `_penalties`."""


@dataclass(frozen=True)
class _Part:
    """The episodes of a batch that are trained on and compared: all, or those of one environment.
    Where conversations have roles, a role's part of an episode stands for an episode.

    dropped: how many episodes leave. rows: indices into the batch of the others' samples; trained:
    the trained positions of each; order: of their tokens in time, see `PlayedTurns`. bounded: 1 for
    each token that pays the KL estimator's bound, else 0; None where there is none.
    """

    environment: str
    dropped: int
    rows: np.ndarray
    trained: list[np.ndarray]
    order: np.ndarray
    episodes: Episodes
    bounded: np.ndarray | None

    @classmethod
    def all_of(cls, batch: Batch, charge: Charge, estimator: AdvantageEstimator) -> list[_Part]:
        """Divide the batch into parts whose episodes are compared with each other. Rewards of
        environments have scales of their own, so that a baseline over a mixture would tell which
        environment it was and not how good an episode was; groups are of one anyway."""
        if not estimator.needs_batch:
            return [cls.of(batch, charge, estimator, np.arange(len(batch)))]
        # So have roles.
        both = zip(batch.strings("environment"), roles_of(batch), strict=True)
        labels = np.array([f"{label}/{role}" if role else label for label, role in both])
        return [
            cls.of(batch, charge, estimator, np.flatnonzero(labels == label), str(label))
            for label in np.unique(labels)
        ]

    @classmethod
    def of(
        cls,
        batch: Batch,
        charge: Charge,
        estimator: AdvantageEstimator,
        members: np.ndarray,
        environment: str = "",
    ) -> _Part:
        """Make the part of these rows, ascending."""
        parts = Parts.of(batch, members)
        keep = filter_episodes(parts.groups, group_relative=estimator.needs_groups)
        rows = members[keep[parts.of_row]]
        episode = (np.cumsum(keep) - 1)[parts.of_row[keep[parts.of_row]]]
        trained = [np.flatnonzero(batch.row("loss_mask", int(row))) for row in rows]
        lengths = np.array([len(positions) for positions in trained], np.int64)
        counts = np.bincount(episode, weights=lengths, minlength=int(keep.sum()))
        # Without differences inside an episode no order matters, where its rows are neighbours.
        order, turns = np.arange(lengths.sum()), None
        compared = parts.groups[keep][episode]
        if estimator.token_level or estimator.turn_level or parts.named:
            played = PlayedTurns.of(batch, rows, episode)
            order = played.token_order
            turns = _turns(batch, rows, played, compared) if estimator.turn_level else None
        penalties, bounded = charge(batch, rows, trained)
        values = _of_tokens(batch, "values", rows, trained) if estimator.needs_values else None
        rewards = batch.scalars("reward")[members[parts.first]]
        if parts.named:
            totals = [batch.row("turn_totals", row).sum(dtype=np.float64) for row in members]
            rewards = np.bincount(parts.of_row, weights=totals, minlength=len(keep))
            # As rewards of episodes are: sums that differ in their last bits only are equal.
            rewards = rewards.astype(np.float32).astype(np.float64)
        rewards = rewards[keep]
        return cls(
            environment=environment,
            dropped=len(keep) - len(rewards),
            rows=rows,
            trained=trained,
            order=order,
            episodes=Episodes.checked(
                rewards,
                parts.groups[keep],
                counts,
                None if penalties is None else penalties[order],
                turns,
                None if values is None else values[order],
            ),
            bounded=bounded,
        )

    def scattered(self, values: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return, by row, the trained positions and their part of the tokens' values, in time."""
        in_rows = np.empty_like(values)
        in_rows[self.order] = values
        cuts = np.cumsum([len(at) for at in self.trained])[:-1]
        of_row = np.split(in_rows, cuts) if self.trained else []
        return dict(zip(self.rows.tolist(), zip(self.trained, of_row, strict=True), strict=True))


def _turns(batch: Batch, rows: np.ndarray, played: PlayedTurns, groups: np.ndarray) -> Turns:
    """The turns of these rows in time, which are compared in their groups, one for each row."""
    order = played.order
    totals = [batch.row("turn_totals", row).astype(np.float64) for row in rows.tolist()]
    counts = [len(each) for each in totals]
    groups = np.repeat(groups, counts)[order]
    return Turns.checked(
        np.concatenate([np.empty(0), *totals])[order],
        played.episodes[order],
        played.tokens[order],
        list(zip(groups.tolist(), played.anchors[order].tolist(), strict=True)),
    )


def _penalties(
    kl: KLConfig,
    coefficient: Coefficient | None,
    batch: Batch,
    rows: np.ndarray,
    trained: list[np.ndarray],
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The penalty that each trained token pays, and which tokens pay the estimator's bound."""
    if kl.placement != "reward":
        return None, None
    estimator = KL_ESTIMATORS.build(kl.estimator)
    each: float | np.ndarray = kl.coefficient
    if coefficient is not None:
        labels = batch.strings("environment")
        of_row = [coefficient(labels[row]) for row in rows.tolist()]
        each = np.repeat(np.array(of_row, dtype=np.float64), [len(at) for at in trained])
    names = "rollout_logprobs", "reference_logprobs"
    both = [_of_tokens(batch, name, rows, trained) for name in names]
    bounded = estimator.bounded(*both)
    # Nobody need have scored what costs nothing.
    return each * estimator.values(*both), None if bounded is None else bounded * (each > 0)


def _of_tokens(batch: Batch, name: str, rows: np.ndarray, trained: list[np.ndarray]) -> np.ndarray:
    """A column's numbers at the rows' trained positions, float64, row after row."""
    parts = [batch.row(name, int(row))[at] for row, at in zip(rows, trained, strict=True)]
    return np.concatenate([np.empty(0), *parts])


def _bounded(parts: list[_Part]) -> dict[str, float]:
    """The share of the trained tokens that pay the estimator's bound."""
    known = [part.bounded for part in parts if part.bounded is not None]
    if not known:
        return {}
    joined = np.concatenate(known)
    return {"kl_bounded_share": float(joined.mean()) if joined.size else 0.0}


def _metrics(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {"mean": 0.0, "std": 0.0, "nonzero_share": 0.0}
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "nonzero_share": float((np.abs(values) > _ROUNDING).mean()),
    }
