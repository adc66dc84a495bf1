"""The plan of states over trees: every run begins with its parent's last state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.learner.attention.state_plan import ConvolutionPlan, StateCall, StatePlan
from earl_core.learner.data.prefix_tree import PrefixTree, build_tree
from earl_core.learner.shared_rows import Rows
from tests.learner.test_prefix_tree import branching


def taken(rows: Rows, values: np.ndarray) -> np.ndarray:
    if rows.places is None:
        return values[rows.start : rows.start + rows.count]
    found: np.ndarray = values[rows.places.numpy()]
    return found


def sequences(call: StateCall, values: np.ndarray) -> list[np.ndarray]:
    """The call's runs, without padding."""
    flat = taken(call.tokens, values)
    if call.cu_seqlens is not None:
        return np.split(flat, call.cu_seqlens.numpy()[1:-1])
    each = flat.reshape(call.count, -1)
    real = np.ones(each.shape, bool) if call.real is None else call.real.numpy()
    return [row[kept] for row, kept in zip(each, real, strict=True)]


def follow(plan: StatePlan, values: np.ndarray) -> np.ndarray:
    """Sums of all before and at each token of a sample, as the plan computes them."""
    outputs, states = [], np.zeros(0)
    for generation in plan.generations:
        ends = []
        for call in generation:
            runs = sequences(call, values)
            begun = np.zeros(call.count) if call.parents is None else taken(call.parents, states)
            sums = [start + np.cumsum(run) for start, run in zip(begun, runs, strict=True)]
            ends += [each[-1] for each in sums]
            width = call.tokens.count // call.count if call.cu_seqlens is None else 0
            outputs += [np.pad(each, (0, max(0, width - each.size))) for each in sums]
        states = np.array(ends)
    every = np.concatenate(outputs)
    assert every.size == plan.padded_tokens
    return every if plan.scatter is None else every[plan.scatter.numpy()]


def tree_of(seed: int, count: int, least: int) -> PrefixTree:
    return build_tree([sample.tokens for sample in branching(seed, count)], least)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from((1, 8, 32)), st.booleans())
def test_a_state_is_its_samples_past(seed: int, count: int, least: int, any_length: bool) -> None:
    tree = tree_of(seed, count, least)
    values = np.random.default_rng(seed).integers(1, 9, tree.size).astype(np.float64)
    found = follow(StatePlan.of(tree, any_length=any_length), values)
    for sample in range(count):
        places = tree.positions(sample)
        np.testing.assert_array_equal(found[places], np.cumsum(values[places]))


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from((1, 8)), st.integers(1, 5))
def test_a_window_is_its_samples_past(seed: int, count: int, least: int, width: int) -> None:
    tree = tree_of(seed, count, least)
    values = np.random.default_rng(seed).integers(1, 9, tree.size).astype(np.float64)
    plan = ConvolutionPlan.of(tree, width)
    sequence, outputs = values, np.arange(tree.size)
    if plan.inputs is not None and plan.zeros is not None and plan.outputs is not None:
        sequence, outputs = taken(plan.inputs, values).copy(), plan.outputs.numpy()
        sequence[plan.zeros.numpy()] = 0.0
    found = np.convolve(sequence, np.ones(width))[outputs]
    for sample in range(count):
        places = tree.positions(sample)
        expected = np.convolve(values[places], np.ones(width))[: places.size]
        np.testing.assert_array_equal(found[places], expected)


@pytest.mark.parametrize(("any_length", "calls"), [(True, 1), (False, 3)])
def test_runs_of_similar_length_share_a_call(any_length: bool, calls: int) -> None:
    tree: Any = build_tree([np.arange(n) + 100 * n for n in (600, 80, 75, 7, 500, 7)], 32)
    plan = StatePlan.of(tree, any_length=any_length)
    assert [len(generation) for generation in plan.generations] == [calls]
    assert plan.padded_tokens <= 1.25 * tree.size
