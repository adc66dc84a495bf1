"""Boxes of whole tensors: their arithmetic, and what ranks of every mesh hold and exchange."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.tensors.slices import Box, shares
from tests.learner.cuts import meshes
from tests.learner.slice_results import RANKS, Slices


@st.composite
def boxes(draw: st.DrawFn, dimensions: int) -> Box:
    offset = draw(st.lists(st.integers(0, 5), min_size=dimensions, max_size=dimensions))
    sizes = draw(st.lists(st.integers(0, 4), min_size=dimensions, max_size=dimensions))
    return Box(tuple(offset), tuple(sizes))


def filled(box: Box, dimensions: int) -> np.ndarray:
    grid = np.zeros((9,) * dimensions, dtype=int)
    grid[box.index] += 1
    return grid


@given(st.data(), st.integers(1, 3))
def test_boxes_are_ranges_of_an_array(data: st.DataObject, dimensions: int) -> None:
    one, other = data.draw(boxes(dimensions)), data.draw(boxes(dimensions))
    both = one.intersect(other)
    here = filled(one, dimensions)
    assert here.sum() == one.numel
    assert np.array_equal(here * filled(other, dimensions) > 0, filled(both, dimensions) > 0)
    values = np.arange(9**dimensions).reshape((9,) * dimensions)
    if both.numel:
        inside = values[one.index][both.within(one).index]
        assert np.array_equal(inside, values[both.index])


@given(st.data(), st.integers(1, 3), st.integers(1, 5))
def test_parts_are_the_box_once(data: st.DataObject, dimensions: int, parts: int) -> None:
    box = data.draw(boxes(dimensions))
    cut = [box.part(number, parts) for number in range(parts)]
    assert np.array_equal(sum(filled(each, dimensions) for each in cut), filled(box, dimensions))
    if box.sizes[0] >= parts:
        sizes = [each.numel for each in cut]
        assert max(sizes) - min(sizes) <= box.numel // box.sizes[0]


@given(st.data(), st.integers(1, 4))
def test_ranks_with_the_same_box_share_it(data: st.DataObject, holders: int) -> None:
    one = data.draw(boxes(2))
    other = Box((one.offset[0] + one.sizes[0], 0), (2, 3))
    held = [one] * holders + [other]
    mine = shares(held)
    assert sum(each.numel for each in mine) == one.numel + other.numel
    assert mine[-1] == other or one == other


def test_a_scalar_belongs_to_one() -> None:
    held = [Box.whole(())] * 3
    assert [each.numel for each in shares(held)] == [1, 0, 0]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_mesh_knows_its_boxes_and_reaches_every_other(ranks: int, slices: Slices) -> None:
    """Uneven sizes, dimensions smaller than the mesh, FSDP2 over tensor parallelism."""
    for answered in slices.results(ranks):
        assert answered["boxes"].keys() == {str(each.axes) for each in meshes(ranks)}
        assert min(answered["boxes"].values()) > 50


@pytest.mark.parametrize("ranks", RANKS)
def test_a_failure_of_one_rank_is_everyones(ranks: int, slices: Slices) -> None:
    """Full disks and shared memory at rank 0 and the last rank (once while parts are on their way
    to another host), and a damaged checkpoint."""
    answers = [answered["failures"] for answered in slices.results(ranks)]
    for messages in zip(*answers, strict=True):
        assert (
            len(
                {
                    message.replace(f"rank {r}: ", "")
                    for r in range(ranks)
                    for message in messages
                    if f"rank {r}: " in message
                }
            )
            == 1
        )
    kinds = [message.split()[:2] for message in answers[0]]
    assert [number for _, number in kinds] == ["28"] * 5 + ["0"]
    full = {"NotWritten", "OSError"}
    assert {kinds[at][0] for at in (0, 2, 3, 4)} <= full
    assert (kinds[1][0], kinds[5][0]) == ("PoolFull", "CheckpointError")
    assert "no room for" in answers[1][0]
    assert "rank 0: " in answers[1][0]
    assert f"rank {ranks - 1}: " in answers[0][2]
