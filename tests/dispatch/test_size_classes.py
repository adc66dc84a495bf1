"""Sizes of segments: few classes, little waste."""

from __future__ import annotations

import mmap

from hypothesis import given
from hypothesis import strategies as st

from earl_core.dispatch.segments.pool_directory import SMALLEST, size_class
from tests.dispatch.segments import MIB


@given(st.integers(0, 1 << 40))
def test_classes_are_whole_pages_and_waste_at_most_a_quarter(size: int) -> None:
    chosen = size_class(size)
    assert chosen >= size
    assert chosen % mmap.PAGESIZE == 0
    assert size_class(chosen) == chosen
    assert chosen == SMALLEST or chosen <= 1.25 * size
    less = chosen - mmap.PAGESIZE
    assert chosen == SMALLEST or size_class(less) != less or less < size


def test_there_are_four_classes_in_an_octave() -> None:
    found = {size_class(size) for size in range(MIB, 2 * MIB, 4096)}
    assert sorted(found) == [MIB, MIB * 5 // 4, MIB * 3 // 2, MIB * 7 // 4, 2 * MIB]
