"""The checkpoints that a return may go to."""

from __future__ import annotations

from earl_core.control.guarding import returnable
from earl_core.guard.decision import Decision, Finding
from earl_core.guard.ladder import Past
from earl_core.run.retention import good_checkpoints, kept_checkpoints

KEPT = 2


def kept(stable: list[int]) -> list[int]:
    """What pruning leaves where nothing is found."""
    left = kept_checkpoints(stable, KEPT, None) | good_checkpoints(stable)
    return [each for each in stable if each in left]


def test_who_was_killed_before_the_last_pruning_has_the_same_choice() -> None:
    stable: list[int] = []
    more = 0
    for iteration in range(20):
        unpruned = [*stable, iteration]
        stable = kept(unpruned)
        more += len(unpruned) > len(stable)
        choices = [returnable(Past({}, 0, each, 0), KEPT) for each in (unpruned, stable)]
        assert choices[0] == choices[1] == stable
    assert more


def test_what_is_kept_for_a_finding_is_among_them() -> None:
    earlier = {17: Decision(findings=(Finding(kind="level_shift", onset=10, text=""),))}
    assert returnable(Past(earlier, 0, [5, 8, 12, 16, 18, 19], 0), KEPT) == [8, 12, 16, 18, 19]
