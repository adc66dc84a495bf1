"""The order in which demonstrations are taken."""

from __future__ import annotations

from earl_core.imitation.drawing import drawn


def test_each_epoch_has_every_demonstration_once_in_an_order_of_its_own() -> None:
    whole = drawn(7, 3, range(28))
    epochs = [whole[at : at + 7] for at in range(0, 28, 7)]
    assert all(sorted(epoch) == [*range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_iterations_of_any_size_take_the_same_row() -> None:
    whole = drawn(7, 3, range(30))
    assert [index for at in range(0, 30, 5) for index in drawn(7, 3, range(at, at + 5))] == whole
    # More than there are, in one iteration.
    assert drawn(7, 3, range(4, 30)) == whole[4:]
    assert drawn(7, 4, range(30)) != whole
