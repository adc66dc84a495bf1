"""Which groups score alike, and how many prompts are played in their place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.control.prompt_waves import whole_iteration
from earl_core.dispatch import Manifest, ManifestError, ShardStore
from earl_core.experience.alike_groups import (
    TRAINED_EPISODES,
    JudgedGroups,
    left_out_rows,
    next_wave,
)
from earl_core.run import RunDirectory
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, SAMPLE_BITS
from tests.columns import copied_rows, list_column
from tests.run.test_run_directory import config_in


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


def test_a_run_that_filters_groups_does_not_guess_what_it_has_played(tmp_path: Path) -> None:
    """Where the seal that says it is lost; other runs have played equally many each time."""
    sizes = {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5}
    plain = RunDirectory.open(config_in(tmp_path, name="plain", rollout=sizes))
    assert [whole_iteration(plain, number).first for number in (0, 3)] == [0, 12]
    plain.close()
    filters = config_in(tmp_path, name="filters", rollout={**sizes, "alike_groups": "replace"})
    run = RunDirectory.open(filters)
    assert whole_iteration(run, 0).first == 0
    with pytest.raises(ManifestError):
        whole_iteration(run, 3)
    run.close()
