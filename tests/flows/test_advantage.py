"""What the advantage stage reports of episodes that failed before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from earl_core.dispatch import Manifest, ShardStore
from earl_core.trajectory.samples import Episode, Sample, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tasks.advantage import with_failures
from tests.flows.test_refused_runs import config_in


@pytest.mark.parametrize(("advantage", "dropped"), [("rloo", 3), ("reinforce", 0)])
def test_failed_episodes_and_groups_are_counted(
    tmp_path: Path, advantage: str, dropped: int
) -> None:
    """Of 5 groups of 3, 5 episodes are left; group 1 has a lone one, groups 3 and 4 have none."""
    store = ShardStore(tmp_path / "store", 2**30)
    episodes = []
    for number in (0, 1, 3, 6, 7):
        sample = Sample()
        sample.begin_turn([1, 2])
        sample.answer([3], [-0.5], 0)
        episodes.append(Episode(number, number // 3, number // 3, [sample], "done"))
    entry = store.publish(
        stage="rollout", iteration=0, rank=0, schema=ROLLOUT_SCHEMA, rows=rollout_rows(episodes)
    )
    rollout = Manifest(
        run="r",
        iteration=0,
        stage="rollout",
        key="k",
        policy_version=0,
        shards=(entry,),
        metrics={"episodes_failed": 10.0},
    )
    config = config_in(
        tmp_path,
        tmp_path / "model",
        rollout={"prompts_per_iteration": 5, "group_size": 3, "max_turns": 1},
        algorithm={"advantage": advantage},
    )
    # As the ranks count: they see the lone episode, and nothing of what failed.
    seen = {"episodes_kept": 4.0, "groups_dropped": 1.0 if dropped else 0.0}
    counted = with_failures(seen, rollout, config)
    assert counted == {**seen, "episodes_failed": 10.0, "groups_dropped": float(dropped)}
