"""Which episodes are trained on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.algorithms import filter_episodes

rows = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 1)), max_size=20)


def test_a_group_with_one_sound_episode_is_dropped() -> None:
    result = filter_episodes(
        [1, 1, 1, 2, 2, 3, 4, 4],
        [False, True, False, True, False, False, True, True],
        group_relative=True,
    )
    assert result.keep.tolist() == [True, False, True, False, False, False, False, False]
    assert result.dropped_groups.tolist() == [2, 3, 4]
    assert result.metrics() == {
        "episodes_kept": 2.0,
        "episodes_failed": 4.0,
        "groups_dropped": 3.0,
        "episodes_dropped_with_group": 2.0,
    }


@given(rows)
def test_without_groups_only_failed_episodes_go(batch: list[tuple[int, bool, int]]) -> None:
    failed = [f for _, f, _ in batch]
    result = filter_episodes([g for g, _, _ in batch], failed, group_relative=False)
    assert result.keep.tolist() == [not f for f in failed]
    assert result.failed_episodes == sum(failed)
    assert result.dropped_groups.size == result.dropped_episodes == 0


@given(rows)
def test_kept_groups_have_two_episodes_and_all_are_accounted_for(
    batch: list[tuple[int, bool, int]],
) -> None:
    groups = np.array([g for g, _, _ in batch], dtype=np.int64)
    failed = np.array([f for _, f, _ in batch], dtype=bool)
    result = filter_episodes(groups, failed, group_relative=True)
    assert not (result.keep & failed).any()
    for group in set(groups.tolist()):
        kept = int((result.keep & (groups == group)).sum())
        sound = int((~failed & (groups == group)).sum())
        assert kept == (sound if sound >= 2 else 0)
        assert (group in result.dropped_groups) == (sound < 2)
    assert result.keep.sum() + result.failed_episodes + result.dropped_episodes == len(batch)


@given(rows)
def test_ranks_that_share_groups_decide_alike(batch: list[tuple[int, bool, int]]) -> None:
    groups = np.array([g for g, _, _ in batch], dtype=np.int64)
    failed = np.array([f for _, f, _ in batch], dtype=bool)
    place = np.array([p for _, _, p in batch], dtype=np.int64)
    whole = filter_episodes(groups, failed, group_relative=True)
    counts = np.bincount(groups[~failed], minlength=5)[groups]
    dropped: set[int] = set()
    for rank in (0, 1):
        mine = place == rank
        part = filter_episodes(
            groups[mine], failed[mine], group_relative=True, sound_in_group=counts[mine]
        )
        assert part.keep.tolist() == whole.keep[mine].tolist()
        dropped |= set(part.dropped_groups.tolist())
    assert dropped == set(whole.dropped_groups.tolist())


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="group ids must be 2"):
        filter_episodes([0], [False, True], group_relative=True)
    with pytest.raises(ValueError, match="one-dimensional"):
        filter_episodes([0], [[False]], group_relative=True)
    with pytest.raises(ValueError, match="for every episode"):
        filter_episodes([0, 0], [False, False], group_relative=True, sound_in_group=[2])
