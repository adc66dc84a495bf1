"""Which episodes are trained on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.algorithms.advantage_batch import filter_episodes

ids = st.lists(st.integers(-2, 4), max_size=20)


@given(ids)
def test_an_episode_needs_another_of_its_group(groups: list[int]) -> None:
    keep = filter_episodes(groups, group_relative=True)
    assert keep.tolist() == [groups.count(group) >= 2 for group in groups]


@given(ids)
def test_without_groups_every_episode_stays(groups: list[int]) -> None:
    assert filter_episodes(groups, group_relative=False).tolist() == [True] * len(groups)


@pytest.mark.parametrize("bad", [[0.5], [[0, 0]]])
@pytest.mark.parametrize("group_relative", [True, False])
def test_ids_that_are_no_integers_in_a_row_are_refused(bad: object, group_relative: bool) -> None:
    with pytest.raises(ValueError, match="group ids must be"):
        filter_episodes(bad, group_relative=group_relative)  # type: ignore[arg-type]
