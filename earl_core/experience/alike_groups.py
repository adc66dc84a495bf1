"""Groups whose episodes score alike: which they are, how many prompts are played in their place,
and which rows leave the batch with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from pydantic import BaseModel

from earl_core.dispatch.reads.sources import sample_ids
from earl_core.dispatch.shards.manifest import Manifest
from earl_core.trajectory.schema import SAMPLE_BITS

TRAINED_EPISODES = "trained_episodes"
"""Among the outputs of a rollout's manifest: the ids of the episodes that are trained on, where the
others leave the batch."""

PROMPTS = "prompts"
"""Among the outputs of a rollout's manifest: [the first prompt's index in the run, the one after
the last]. Absent where every iteration of the run has played equally many."""

ENOUGH_SHARE = 0.1
"""Share of the groups that has to differ, or a warning says that most prompts teach nothing."""


class JudgedGroups(BaseModel):
    """Groups, ascending: those with rewards that differ, and those whose rewards, two or more, are
    all the same. A group with fewer rewards, because its other episodes failed, is in neither."""

    different: list[int] = []
    alike: list[int] = []

    @classmethod
    def of(cls, rewards: Mapping[int, Sequence[float]]) -> JudgedGroups:
        """rewards: of the episodes of each group, compared as they are stored, float32."""
        judged = cls()
        for group, values in sorted(rewards.items()):
            if len(values) > 1:
                same = len(np.unique(np.asarray(values, dtype=np.float32))) == 1
                (judged.alike if same else judged.different).append(group)
        return judged

    @classmethod
    def of_roles(cls, roles: Iterable[JudgedGroups]) -> JudgedGroups:
        """Return the groups of roles, which differ where one of their roles does."""
        parts = list(roles)
        different = {group for part in parts for group in part.different}
        alike = {group for part in parts for group in part.alike} - different
        return cls(different=sorted(different), alike=sorted(alike))

    @classmethod
    def together(cls, parts: Sequence[JudgedGroups]) -> JudgedGroups:
        """Return the groups of all parts, each of which is in one."""
        return cls(
            different=sorted(group for part in parts for group in part.different),
            alike=sorted(group for part in parts for group in part.alike),
        )

    def trained(self, most: int) -> list[int]:
        """Return the groups that are trained on: the first `most` that differ."""
        return self.different[:most]


def next_wave(asked: int, played: int, different: int, waves: int, most: int) -> int:
    """Return how many prompts the next wave plays; 0: there is none.

    asked: the groups that are to differ. played, different: how many groups were played and differ,
    after so many waves of `most`. A wave plays as many prompts as the share that differed so far
    lets expect to suffice, and never more than the first, which plays those that are asked for.
    """
    missing = asked - different
    if waves == 0:
        return asked
    if missing <= 0 or waves >= most:
        return 0
    return min(asked, math.ceil(missing * played / different)) if different else asked


def left_out_rows(rollout: Manifest) -> np.ndarray:
    """Return the int64 sample_ids of a rollout's rows that are not trained on; mostly none."""
    trained = rollout.outputs.get(TRAINED_EPISODES)
    if trained is None:
        return np.empty(0, dtype=np.int64)
    rows = sample_ids(rollout)
    return rows[~np.isin(rows >> SAMPLE_BITS, np.array(trained, dtype=np.int64))]
