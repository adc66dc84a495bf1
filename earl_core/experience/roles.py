"""Roles: what the conversations of an episode are compared by, where an agent names theirs.

Each role's part of an episode has a return of its own: the rewards of its turns, and what all roles
share. It is compared with the same role's parts of the group's other episodes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel

from earl_core.algorithms.moments import Int64Array, Moments
from earl_core.dispatch.reads.batch import Batch
from earl_core.environments.agent import UNNAMED
from earl_core.trajectory.samples import OPPONENT_ROLE, Rows

ROLE = "role"


def roles_of(batch: Batch) -> list[str]:
    """The role of each row; shards of an older version name none."""
    return batch.strings(ROLE) if ROLE in batch.names() else [""] * len(batch)


def shared_of(batch: Batch) -> np.ndarray:
    """What the roles of each row's episode share, float64."""
    if ROLE not in batch.names():
        return np.zeros(len(batch))
    return batch.scalars("shared_reward").astype(np.float64)


def own_rows(batch: Batch) -> np.ndarray:
    """Whether each row is the episode's own, and not its opponent's."""
    return np.array([role != OPPONENT_ROLE for role in roles_of(batch)], dtype=bool)


@dataclass(frozen=True)
class Parts:
    """The episodes of some rows, or, where roles have names, each role's part of them.

    of_row: index of each row's part. first: the row that a part begins with, as an index into the
    rows. groups: equal where parts are compared. named: whether some role of the batch has a name.
    """

    of_row: Int64Array
    first: Int64Array
    groups: Int64Array
    named: bool

    @classmethod
    def of(cls, batch: Batch, members: np.ndarray) -> Parts:
        """members: indices of the rows, ascending."""
        episodes = batch.scalars("episode_id")[members]
        names = roles_of(batch)
        of_rows = [names[row] for row in members.tolist()]
        _, roles = np.unique(np.array(of_rows, dtype=object), return_inverse=True)
        groups = batch.scalars("group_id")[members]
        # Conversations without a name are a part where others of their episode have one.
        named = any(names)
        if not named:
            _, first, of_row = np.unique(episodes, return_index=True, return_inverse=True)
            return cls(of_row, first, groups[first], False)
        _, first, of_row = _unique_pairs(episodes, roles)
        _, _, compared = _unique_pairs(groups, roles)
        return cls(of_row, first, compared[first], True)


def _unique_pairs(
    ones: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, Int64Array, Int64Array]:
    """As `np.unique` of pairs, ascending, with first places and inverse. others: small numbers."""
    _, numbered = np.unique(ones, return_inverse=True)
    pairs = numbered * (int(others.max(initial=0)) + 1) + others
    found, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    return found, first, inverse


def role_returns(
    batch: Batch, rewarded: Rows, without: Collection[int] = ()
) -> dict[str, dict[int, list[float]]]:
    """The returns of each named role's parts by group. rewarded: as of `reward_rows`. without:
    groups that do not count. Empty where no role has a name."""
    rows = np.searchsorted(batch.rows, np.asarray(rewarded.numbers["sample_id"]))
    parts = Parts.of(batch, rows)
    if not parts.named:
        return {}
    totals = [float(np.sum(each)) for each in rewarded.numbers["turn_totals"]]
    # Rounded as in `experience.advantage`.
    returns = np.bincount(parts.of_row, weights=totals).astype(np.float32).tolist()
    names, groups = roles_of(batch), batch.scalars("group_id")
    found: dict[str, dict[int, list[float]]] = {}
    for row, value in zip(rows[parts.first].tolist(), returns, strict=True):
        if (group := int(groups[row])) not in without:
            found.setdefault(names[row], {}).setdefault(group, []).append(value)
    return found


class RoleMoments(BaseModel):
    """Moments of each role's returns; those without a name are always there, because other ranks
    may have a role with one."""

    moments: dict[str, Moments] = {}

    @classmethod
    def of(cls, returns: dict[str, dict[int, list[float]]]) -> RoleMoments:
        """returns: as `role_returns` gives them."""
        return cls(
            moments={
                role: Moments.from_values([value for values in groups.values() for value in values])
                for role, groups in returns.items()
            }
        )

    def merge(self, other: RoleMoments) -> RoleMoments:
        """Return the moments of both ranks' parts."""
        names = {**self.moments, **other.moments}
        none = Moments()
        return RoleMoments(
            moments={
                name: self.moments.get(name, none).merge(other.moments.get(name, none))
                for name in names
            }
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Mean and standard deviation of each role's returns; none where no role has a name."""
        metrics: dict[str, float] = {}
        counted = {role: each for role, each in self.moments.items() if each.count}
        for role, moments in counted.items() if any(counted) else ():
            name = f"of_role/{role or UNNAMED}"
            metrics |= {f"{name}/mean": moments.mean, f"{name}/std": moments.std()}
        return metrics
