"""Moments merged from parts equal moments of the whole."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.algorithms.moments import Moments, group_moments

numbers = st.floats(-1e6, 1e6, allow_nan=False, width=64)


def close(first: Moments, second: Moments) -> None:
    assert first.count == second.count
    assert first.mean == pytest.approx(second.mean, rel=1e-9, abs=1e-6)
    assert first.m2 == pytest.approx(second.m2, rel=1e-7, abs=1e-3)


@given(st.lists(numbers, min_size=2, max_size=30))
def test_against_the_standard_library(values: list[float]) -> None:
    moments = Moments.from_values(values)
    assert moments.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert moments.std() == pytest.approx(statistics.pstdev(values), rel=1e-7, abs=1e-5)
    assert moments.std(ddof=1) == pytest.approx(statistics.stdev(values), rel=1e-7, abs=1e-5)


@given(st.lists(st.lists(numbers, max_size=8), max_size=6))
def test_merging_parts_gives_the_whole(parts: list[list[float]]) -> None:
    whole = Moments.from_values([value for part in parts for value in part])
    known = [Moments.from_values(part) for part in parts]
    close(reduce(Moments.merge, known, Moments()), whole)
    close(reduce(Moments.merge, reversed(known), Moments()), whole)


@given(st.lists(st.tuples(numbers, st.integers(0, 5)), max_size=12))
def test_frequencies_repeat_values(pairs: list[tuple[float, int]]) -> None:
    repeated = [value for value, times in pairs for _ in range(times)]
    weighted = Moments.from_values([v for v, _ in pairs], frequencies=[n for _, n in pairs])
    close(weighted, Moments.from_values(repeated))


@given(numbers, st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_equal_values_have_exactly_no_variance(value: float, sizes: list[int]) -> None:
    merged = reduce(
        Moments.merge, (Moments.from_values([value] * size) for size in sizes), Moments()
    )
    assert merged.m2 == 0.0
    assert merged.count == 0 or merged.mean == value


def test_a_large_offset_keeps_the_variance() -> None:
    values = 1e9 + np.arange(5.0)
    assert Moments.from_values(values).variance() == pytest.approx(2.0, rel=1e-12)
    merged = Moments.from_values(values[:2]).merge(Moments.from_values(values[2:]))
    assert merged.variance() == pytest.approx(2.0, rel=1e-9)


def test_empty_and_single_sets_have_variance_zero() -> None:
    assert Moments().variance() == Moments().std(ddof=1) == 0.0
    assert Moments.from_values([4.0]).variance(ddof=1) == 0.0
    assert Moments.from_values([4.0]).merge(Moments()) == Moments(1, 4.0, 0.0)


@given(st.lists(st.tuples(numbers, st.integers(-3, 3)), max_size=30))
def test_each_group_by_itself(rows: list[tuple[float, int]]) -> None:
    values = np.array([v for v, _ in rows], dtype=np.float64)
    arrays = group_moments(values, np.array([g for _, g in rows], dtype=np.int64))
    assert len(arrays.counts) == len(rows)
    for at, (_, group) in enumerate(rows):
        expected = Moments.from_values([v for v, g in rows if g == group])
        close(Moments(int(arrays.counts[at]), arrays.means[at], arrays.m2s[at]), expected)
        assert arrays.std(ddof=1)[at] == pytest.approx(expected.std(ddof=1), rel=1e-7, abs=1e-3)


@given(st.lists(numbers, max_size=20))
def test_json_keeps_every_bit(values: list[float]) -> None:
    moments = Moments.from_values(values)
    assert Moments(**json.loads(json.dumps(asdict(moments)))) == moments


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="number 1 is nan"):
        Moments.from_values([0.0, float("nan")])
    with pytest.raises(ValueError, match="one-dimensional"):
        Moments.from_values([[0.0]])
    with pytest.raises(ValueError, match="non-negative integers"):
        Moments.from_values([1.0, 2.0], frequencies=[1])
