"""Which groups score alike, and how many prompts are played in their place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from earl_core.dispatch import Manifest, ShardStore
from earl_core.experience.alike_groups import (
    TRAINED_EPISODES,
    JudgedGroups,
    left_out_rows,
    next_wave,
)
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, SAMPLE_BITS
from tests.columns import copied_rows, list_column


def test_groups_are_judged_by_the_rewards_that_their_episodes_have() -> None:
    judged = JudgedGroups.of(
        {
            9: [0.0, 0.0, 1.0],
            4: [0.5, 0.5],
            7: [-1.0, 1.0],
            5: [2.0],
            # One number as it is stored.
            6: [0.1, 0.1 + 1e-12],
        }
    )
    assert (judged.different, judged.alike) == ([7, 9], [4, 6])
    both = JudgedGroups.together([judged, JudgedGroups(different=[8], alike=[1])])
    assert (both.different, both.alike) == ([7, 8, 9], [1, 4, 6])
    assert both.trained(2) == [7, 8]


@given(
    asked=st.integers(1, 40),
    most=st.integers(1, 6),
    differs=st.lists(st.booleans(), min_size=240, max_size=240),
)
def test_waves_play_each_prompt_once_and_no_more_than_it_takes(
    asked: int, most: int, differs: Sequence[bool]
) -> None:
    """Against the stream of all prompts, of which it is known whether their groups will differ."""
    sizes: list[int] = []
    played = 0
    while size := next_wave(asked, played, sum(differs[:played]), len(sizes), most):
        assert 1 <= size <= asked
        # As many as it takes by the share so far, rounded up, unless that is more than the first.
        if sizes:
            missing, found = asked - sum(differs[:played]), sum(differs[:played])
            assert missing > 0
            assert size == asked or (size - 1) * found < missing * played <= size * found
        played += size
        sizes.append(size)
    found = sum(differs[:played])
    assert sizes[0] == asked
    assert len(sizes) == most or found >= asked
    assert len(sizes) <= most
    assert not any(sum(differs[: sum(sizes[:n])]) >= asked for n in range(1, len(sizes)))
    groups = {n: [0.0, float(differ)] for n, differ in enumerate(differs[:played])}
    trained = JudgedGroups.of(groups).trained(asked)
    assert trained == [n for n in range(played) if differs[n]][:asked]


def test_rows_of_other_episodes_are_left_out(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 2**30)
    rows = [5 << SAMPLE_BITS, 5 << SAMPLE_BITS | 1, 6 << SAMPLE_BITS, 9 << SAMPLE_BITS]
    columns = {
        "sample_id": np.array(rows),
        "advantages": list_column([[0.0]] * 4, "float32"),
    }
    entry = store.publish(
        stage="rollout", iteration=0, rank=0, schema=ADVANTAGE_SCHEMA, rows=copied_rows(columns)
    )
    rollout = Manifest(
        run="r", iteration=0, stage="rollout", key="k", policy_version=0, shards=(entry,)
    )
    assert left_out_rows(rollout).tolist() == []
    filtered = rollout.model_copy(update={"outputs": {TRAINED_EPISODES: [6, 7]}})
    assert left_out_rows(filtered).tolist() == [rows[0], rows[1], rows[3]]
