"""The reward stage: one reward per episode, of its turns' rewards and what reward functions gave.

An episode that a function could not score has no reward, and so no row: the advantage stage, which
reads the rows that both the rollout and the reward have, does not see it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from earl_core.algorithms.moments import Moments
from earl_core.cluster.rpc import Rule, merge_results
from earl_core.config import RunConfig
from earl_core.config.reward import RewardConfig
from earl_core.dispatch.reads.batch import Batch
from earl_core.experience.group_returns import GroupReturns
from earl_core.experience.played_turns import PlayedTurns
from earl_core.experience.probe import of_probe
from earl_core.experience.roles import Parts, RoleMoments, own_rows, shared_of
from earl_core.experience.row_results import merge_rows
from earl_core.guard.seen import SEEN, Seen, merged_sources, shortened
from earl_core.run.worker import READ_RULES
from earl_core.system.errors import EarlError
from earl_core.trajectory.samples import Rows

REWARD_RULES: dict[str, Rule] = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "seconds": "max",
    **READ_RULES,
}
"""Rules that merge the metrics of several ranks; their weight is their number of episodes."""

_NAMED_FAILURES = 3
_FAILURE_CHARACTERS = 1500

Scored = Mapping[int, Mapping[str, float]]
"""Scores that functions gave, by label, of each episode."""


def reward_rows(
    batch: Batch,
    settings: RewardConfig,
    scored: Scored | None = None,
    own_weight: Callable[[str], float] | None = None,
    again: Collection[int] = (),
) -> tuple[Rows, dict[str, float], int]:
    """Rows of `REWARD_SCHEMA`, metrics, and the number of episodes they are over.

    An episode's reward is the sum of its turns' rewards over all its samples by the environment's
    weight, and of its scores by those of the functions, float64 before it is stored as float32;
    each of the episode's samples carries it, and the scores count at the turn that was last in
    time; where conversations have roles, at the last turn of each, and so does what they share.
    Rewards of an opponent that is trained, too, are in its turns alone. The
    batch holds all samples of its episodes, at least one. scored: the episodes that have a reward;
    None: all, without scores. own_weight: the environment's weight by its label; None: they all
    have that of the settings. again: groups that were trained before, which have rows, and which
    the metrics are not over.
    """
    episodes, first, inverse = np.unique(
        batch.scalars("episode_id"), return_index=True, return_inverse=True
    )
    paid = [rewards.astype(np.float64) for rewards in batch.list_rows("turn_rewards")]
    lengths = np.array([len(each) for each in paid], dtype=np.int64)
    weights = np.full(len(batch), settings.environment_weight)
    if own_weight is not None:
        weights = np.array([own_weight(label) for label in batch.strings("environment")])
    turns = np.repeat(weights, lengths) * np.concatenate([np.empty(0), *paid])
    of_own = own_rows(batch)
    counted_turns = turns * np.repeat(of_own, lengths)
    own = np.bincount(np.repeat(inverse, lengths), counted_turns, minlength=len(episodes))
    given = [{} if scored is None else scored.get(number) for number in episodes.tolist()]
    added = np.array([settings.added(each or {}) for each in given], dtype=np.float64)
    added += (weights * shared_of(batch))[first]
    parts = Parts.of(batch, np.arange(len(batch)))
    if scored is not None or parts.named:
        present, last = PlayedTurns.of(batch, np.arange(len(batch)), parts.of_row).last
        turns[last] += (added[inverse] * of_own)[parts.first][present]
    turns_of = np.split(turns, np.cumsum(lengths)[:-1])
    totals, kept = own + added, np.array([each is not None for each in given])
    rows = np.flatnonzero(kept[inverse])
    chosen = inverse[rows].tolist()
    texts = [json.dumps(each) for each in given]
    counted = kept & ~np.isin(batch.scalars("group_id")[first], list(again))
    metrics = _metrics(totals[counted]) if counted.any() else {}
    return (
        Rows(
            {
                "sample_id": batch.rows[rows],
                "reward": totals[chosen],
                "turn_totals": [turns_of[row] for row in rows.tolist()],
            },
            {"turn_totals": lengths[rows]},
            {"scores": [texts[episode] for episode in chosen]},
        ),
        metrics,
        int(counted.sum()),
    )


def _metrics(totals: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(totals.mean()),
        "std": float(totals.std()),
        "min": float(totals.min()),
        "max": float(totals.max()),
    }


class ScoreTally(BaseModel):
    """Scores of one rank: moments of the functions' scores, by label, and of the metrics that they
    told, by `label/name`; how many episodes have no reward, why the first of them, and how many
    have none because a function gave no number that one can have."""

    moments: dict[str, Moments] = Field(default_factory=dict)
    failed: int = 0
    failures: list[str] = Field(default_factory=list)
    invalid: int = 0

    @classmethod
    def of(cls, failures: Mapping[int, str], invalid: int) -> ScoreTally:
        """failures: by episode. invalid: how many of them are."""
        named = sorted(failures.items())[:_NAMED_FAILURES]
        told = [f"episode {number}: {why[-_FAILURE_CHARACTERS:]}" for number, why in named]
        return cls(failed=len(failures), failures=told, invalid=invalid)

    def with_scores(self, numbers: Sequence[Mapping[str, float]]) -> ScoreTally:
        """Add moments. numbers: by name, of each episode that has a reward."""
        names = sorted({name for each in numbers for name in each})
        moments = {
            name: Moments.from_values([each[name] for each in numbers if name in each])
            for name in names
        }
        return self.model_copy(update={"moments": moments})

    def after(self, others: Iterable[ScoreTally]) -> ScoreTally:
        """Return the failures of these and of others, which came first, without moments."""
        every = [*others, self]
        named = [told for each in every for told in each.failures]
        failed, invalid = (sum(getattr(each, n) for each in every) for n in ("failed", "invalid"))
        return ScoreTally(failed=failed, failures=named, invalid=invalid)

    def check(self, episodes: int, config: RunConfig) -> None:
        """Raise `EarlError` when too many of these episodes have no reward, or all. A guard that
        acts has those leave that got no number, as long as they are fewer than half."""
        share = config.reward.max_failed_share
        share = config.rollout.max_failed_share if share is None else share
        spared = config.guard == "act" and 2 * self.invalid < episodes
        failed = self.failed - self.invalid if spared else self.failed
        if failed and (failed > share * episodes or self.failed == episodes):
            raise EarlError(
                f"{self.failed} of {episodes} episodes have no reward, because reward functions "
                f"failed, and reward.max_failed_share allows a share of {share:g}",
                remedy="repair the functions, or what they ask, and resume: the rollout is kept. "
                "The first failures:\n  " + "\n  ".join(self.failures[:_NAMED_FAILURES]),
                payload={"failed": self.failed, "episodes": episodes},
            )


def merge_rewards(
    results: Sequence[Mapping[str, Any]],
    config: RunConfig,
    before: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Merge the results of the ranks. before: results for the iteration's earlier waves. Raises
    `EarlError` when, with these, too many episodes have no reward."""
    merged = merge_results(results, REWARD_RULES)
    roles = [RoleMoments.model_validate(result.get("roles", {})) for result in results]
    merged["metrics"] |= reduce(RoleMoments.merge, roles, RoleMoments()).metrics
    merged["outputs"] = {}
    if config.draws_by_returns:
        parts = [each.get("rows", {}) for each in results]
        rows = {"rows": merge_rows(parts)} if config.row_curricula else {}
        returns = {"returns": _merged_returns(results)} if config.curriculum else {}
        merged["outputs"] = {**returns, **rows}
    if config.guard != "off":
        merged["outputs"][SEEN] = _merged_seen(results)
        merged["outputs"] |= of_probe(results)
    if not config.reward.functions:
        return merged
    whole = ScoreTally()
    for result in results:
        part = ScoreTally.model_validate(result["scores"])
        whole.failed += part.failed
        whole.invalid += part.invalid
        whole.failures += part.failures
        for name, moments in part.moments.items():
            whole.moments[name] = whole.moments.get(name, Moments()).merge(moments)
    everything = whole.after(ScoreTally.model_validate(each["scores"]) for each in before)
    rewarded = sum(result["weight"] for result in (*before, *results))
    everything.check(rewarded + everything.failed, config)
    metrics = merged["metrics"] | {"episodes_failed": float(whole.failed)}
    for name, moments in whole.moments.items():
        if "/" in name:
            metrics[f"of/{name}"] = moments.mean
    for title in {each.title for each in config.reward.functions} & set(whole.moments):
        moments = whole.moments[title]
        metrics |= {f"of/{title}/mean": moments.mean, f"of/{title}/std": moments.std()}
    return {**merged, "metrics": metrics}


def _merged_seen(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts = ({s: Seen.model_validate(e) for s, e in r.get(SEEN, {}).items()} for r in results)
    whole = shortened(merged_sources(parts))
    return {source: each.model_dump(mode="json") for source, each in whole.items()}


def _merged_returns(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole: dict[str, GroupReturns] = {}
    for result in results:
        for label, returns in result.get("returns", {}).items():
            part = GroupReturns.model_validate(returns)
            whole[label] = whole[label].merge(part) if label in whole else part
    return {label: each.model_dump(mode="json") for label, each in whole.items()}
