"""Differences of the rewards in an environment's groups, which a curriculum learns from."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel

from earl_core.algorithms.moments import Moments
from earl_core.dispatch.reads.batch import Batch
from earl_core.trajectory.samples import Rows


class Span(BaseModel):
    """The least and the greatest of some numbers."""

    low: float
    high: float

    def merge(self, other: Span | None) -> Span:
        """Return the span of both sets together."""
        if other is None:
            return self
        return Span(low=min(self.low, other.low), high=max(self.high, other.high))


class GroupReturns(BaseModel):
    """Rewards of one environment's groups. spreads: of each group with two rewarded episodes or
    more, the standard deviation of their rewards. span: of all rewards."""

    spreads: Moments
    span: Span

    @classmethod
    def of(cls, groups: list[list[float]]) -> GroupReturns:
        """groups: the rewards of each, one at least."""
        rewards = [reward for group in groups for reward in group]
        spreads = [Moments.from_values(group).std() for group in groups if len(group) > 1]
        return cls(
            spreads=Moments.from_values(spreads), span=Span(low=min(rewards), high=max(rewards))
        )

    def merge(self, other: GroupReturns) -> GroupReturns:
        """Return the statistics of both sets of groups together."""
        return GroupReturns(
            spreads=self.spreads.merge(other.spreads), span=self.span.merge(other.span)
        )


def group_returns(batch: Batch, rewarded: Rows) -> dict[str, GroupReturns]:
    """Compute the returns of groups by the labels of the environments. rewarded: as of
    `reward_rows`; groups are whole."""
    found: dict[str, list[list[float]]] = {}
    for label, rewards in _by_group(batch, rewarded).values():
        found.setdefault(label, []).append(rewards)
    return {label: GroupReturns.of(found[label]) for label in found}


def group_rewards(batch: Batch, rewarded: Rows) -> dict[int, list[float]]:
    """Return the rewards of the episodes of each group; arguments as of `group_returns`."""
    return {group: rewards for group, (_, rewards) in _by_group(batch, rewarded).items()}


def _by_group(batch: Batch, rewarded: Rows) -> dict[int, tuple[str, list[float]]]:
    """Return each group's environment and the rewards of its episodes, by ascending episode_id."""
    rows = np.searchsorted(batch.rows, np.asarray(rewarded.numbers["sample_id"]))
    _, first = np.unique(batch.scalars("episode_id")[rows], return_index=True)
    rewards = np.asarray(rewarded.numbers["reward"])[first].tolist()
    groups, labels = batch.scalars("group_id")[rows[first]].tolist(), batch.strings("environment")
    found: dict[int, tuple[str, list[float]]] = {}
    for row, group, reward in zip(rows[first].tolist(), groups, rewards, strict=True):
        found.setdefault(group, (labels[row], []))[1].append(reward)
    return found
