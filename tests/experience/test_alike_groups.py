"""Which groups score alike, and how many prompts are played in their place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.config import ConfigError
from earl_core.control.prompt_waves import check_numbers, few_differ, taken_before, whole_iteration
from earl_core.dispatch import Manifest, ManifestError, ShardStore
from earl_core.experience.alike_groups import (
    TRAINED_EPISODES,
    JudgedGroups,
    left_out_rows,
    next_wave,
)
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import describe_state
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


@pytest.mark.parametrize(("different", "told"), [(0, True), (1, True), (2, False), (20, False)])
def test_a_warning_says_when_fewer_than_a_tenth_of_the_groups_differ(
    different: int, told: bool
) -> None:
    counts = {"groups_different": float(different), "groups_alike": 20.0 - different}
    said = few_differ(counts, 3)
    assert said.startswith(f"iteration 3: only {different} of 20 groups have rewards") == told
    assert bool(said) == told


def test_a_run_that_filters_groups_does_not_guess_what_it_has_played(tmp_path: Path) -> None:
    """Where the seal that says it is lost."""
    filters = config_in(tmp_path, rollout={**SIZES, "alike_groups": "replace"})
    run = RunDirectory.open(filters)
    assert whole_iteration(run, 0).first == 0
    with pytest.raises(ManifestError):
        whole_iteration(run, 3)
    run.close()


SIZES = {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5}


def test_sizes_that_change_on_resume_neither_skip_nor_repeat_prompts(tmp_path: Path) -> None:
    """Nor demonstrations. Counted is what the last checkpoint covers, by the sizes of then."""
    chats = {"data": "chats.jsonl", "iterations": 2, "episodes_per_iteration": 5}
    run = RunDirectory.open(config_in(tmp_path, rollout=SIZES, imitation=chats, iterations=9))
    assert [taken_before(run, k) for k in (0, 1, 2, 3, 6)] == [
        (0, 0), (0, 5), (0, 10), (4, 10), (16, 10),
    ]  # fmt: skip
    _checkpoint(run, 3)
    run.close()
    more = {**SIZES, "prompts_per_iteration": 7}
    run = RunDirectory.open(config_in(tmp_path, rollout=more, imitation=chats, iterations=9))
    assert [whole_iteration(run, k).first for k in (4, 5, 6)] == [8, 15, 22]
    assert whole_iteration(run, 4).outputs({})["prompts"] == [8, 15]
    _checkpoint(run, 4)
    assert [whole_iteration(run, k).first for k in (5, 6)] == [15, 22]
    run.close()
    # The checkpoint says it, too, where seals of then do not.
    filters = {**more, "alike_groups": "drop"}
    run = RunDirectory.open(config_in(tmp_path, rollout=filters, imitation=chats, iterations=9))
    assert whole_iteration(run, 5).first == 15
    run.close()


def test_a_stream_keeps_its_batches(tmp_path: Path) -> None:
    stream = {
        "schedule": {"mode": "stream", "staleness": 1},
        "algorithm": {"importance_correction": {}},
        "iterations": 9,
    }
    sizes = {**SIZES, "engine": "torch"}
    run = RunDirectory.open(config_in(tmp_path, rollout=sizes, **stream))
    check_numbers(run)
    _checkpoint(run, 3)
    check_numbers(run)
    run.close()
    more = {**sizes, "prompts_per_iteration": 7}
    run = RunDirectory.open(config_in(tmp_path, rollout=more, **stream))
    with pytest.raises(ConfigError, match=r"batches of 7, and the 4 iterations .* 16 prompts"):
        check_numbers(run)
    run.close()


def test_demonstrations_are_counted_likewise(tmp_path: Path) -> None:
    chats = {"data": "chats.jsonl", "iterations": 4, "episodes_per_iteration": 5}
    run = RunDirectory.open(config_in(tmp_path, imitation=chats, iterations=9))
    _checkpoint(run, 1)
    run.close()
    # More of them, and for longer.
    chats |= {"episodes_per_iteration": 3, "iterations": 5}
    run = RunDirectory.open(config_in(tmp_path, imitation=chats, iterations=9))
    assert [taken_before(run, k) for k in (2, 3, 5, 6)] == [(0, 10), (0, 13), (0, 19), (4, 19)]
    run.close()


def _checkpoint(run: RunDirectory, iteration: int) -> None:
    """As an update writes one."""
    taken, place = taken_before(run, iteration + 1), run.checkpoint_path(iteration)
    counts = {"prompts_trained": taken[0], "demonstrations_trained": taken[1]}
    place.mkdir(parents=True)
    describe_state(place, {"policy_version": iteration + 1, **counts}, {})
    run.mark_stable(iteration)
