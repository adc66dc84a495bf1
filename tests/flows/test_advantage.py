"""What the advantage stage reports of episodes that failed before it."""

from __future__ import annotations

import pytest

from tasks.advantage import with_failures


@pytest.mark.parametrize(("groups", "dropped"), [(3, 3.0), (None, 0.0)])
def test_failed_episodes_and_groups_are_counted(groups: int | None, dropped: float) -> None:
    """Of 5 groups, one has a lone episode and two have none; None: no groups are compared."""
    # As the ranks count: they see the lone episode, and nothing of what failed.
    seen = {"episodes_kept": 4.0, "groups_dropped": 1.0 if groups else 0.0}
    counted = with_failures(seen, 10.0, 5, groups)
    assert counted == {**seen, "episodes_failed": 10.0, "groups_dropped": dropped}
