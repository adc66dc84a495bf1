"""Advantage estimators against plain Python, and their independence of how a batch is spread."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.algorithms.advantage_batch import Episodes, batch_moments, token_advantages
from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.moments import Moments
from tests.algorithms.central import compute_advantages

SPECS: list[dict[str, Any]] = [
    {"name": "reinforce"},
    {"name": "reinforce", "baseline": "batch_mean"},
    {"name": "reinforce_plus_plus"},
    {"name": "rloo"},
    {"name": "grpo"},
    {"name": "grpo", "epsilon": 1e-4},
    {"name": "dr_grpo"},
]
every_estimator = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: "-".join(map(str, s.values()))
)


def plain(
    spec: dict[str, Any],
    rewards: Sequence[float],
    groups: Sequence[int],
    penalties: Sequence[Sequence[float]],
) -> list[list[float]]:
    """Token advantages of each episode, written down from the papers without NumPy."""
    name, counts = spec["name"], [len(p) for p in penalties]
    if name == "reinforce_plus_plus":
        returns = [
            [reward - math.fsum(taken[t:]) for t in range(len(taken))]
            for reward, taken in zip(rewards, penalties, strict=True)
        ]
        flat = [value for episode in returns for value in episode]
        mean = statistics.fmean(flat)
        std = max(statistics.pstdev(flat), 1e-4)
        return [[(value - mean) / std for value in episode] for episode in returns]
    totals = [r - math.fsum(p) for r, p in zip(rewards, penalties, strict=True)]

    def value(index: int) -> float:
        group = [t for t, g in zip(totals, groups, strict=True) if g == groups[index]]
        own, others = totals[index], list(group)
        others.remove(own)
        if name == "reinforce":
            return own - (statistics.fmean(totals) if spec.get("baseline") else 0.0)
        if name == "dr_grpo":
            return own - statistics.fmean(group)
        if not others:
            return 0.0
        if name == "rloo":
            return own - statistics.fmean(others)
        epsilon = float(spec.get("epsilon", 1e-6))
        return (own - statistics.fmean(group)) / (statistics.stdev(group) + epsilon)

    return [[value(i)] * counts[i] for i in range(len(rewards))]


# Multiples of 1/8 are added exactly, so that no group is nearly but not quite without variance.
eighths = st.integers(-24, 24).map(lambda n: n / 8)


@st.composite
def batches(
    draw: st.DrawFn, penalised: bool = True
) -> tuple[list[float], list[int], list[list[float]]]:
    size = draw(st.integers(1, 10))
    rewards = draw(st.lists(eighths, min_size=size, max_size=size))
    groups = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    token = eighths if penalised else st.just(0.0)
    penalties = [draw(st.lists(token, min_size=1, max_size=5)) for _ in range(size)]
    return rewards, groups, penalties


def run(spec: dict[str, Any], rewards: Any, groups: Any, penalties: Any, **kwargs: Any) -> Any:
    return compute_advantages(
        ADVANTAGE_ESTIMATORS.build(spec),
        rewards,
        groups,
        [len(p) for p in penalties],
        np.concatenate([np.zeros(0), *map(np.asarray, penalties)])
        if kwargs.get("penalise", True)
        else None,
    )


def by_episode(tokens: Any, counts: Sequence[int]) -> list[Any]:
    """The advantages of each episode's trained tokens."""
    return np.split(tokens, np.cumsum(counts)[:-1]) if len(counts) else []


def run_by_episode(spec: dict[str, Any], *batch: Any, **kwargs: Any) -> list[Any]:
    return by_episode(run(spec, *batch, **kwargs), [len(p) for p in batch[2]])


@every_estimator
@given(batch=batches())
def test_against_plain_python_with_penalties(spec: dict[str, Any], batch: Any) -> None:
    found = run_by_episode(spec, *batch)
    for mine, theirs in zip(found, plain(spec, *batch), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-8)


@every_estimator
@given(batch=batches(penalised=False))
def test_no_penalty_is_the_same_as_penalties_of_zero(spec: dict[str, Any], batch: Any) -> None:
    without = run(spec, *batch, penalise=False)
    np.testing.assert_allclose(without, run(spec, *batch), rtol=1e-9, atol=1e-9)


@every_estimator
@given(batch=batches(), penalise=st.booleans(), data=st.data())
def test_ranks_that_exchange_moments_only(
    spec: dict[str, Any], batch: Any, penalise: bool, data: st.DataObject
) -> None:
    estimator = ADVANTAGE_ESTIMATORS.build(spec)
    rewards, groups, penalties = batch
    # A group is whole on one rank where its moments are needed, else an episode is.
    rank_of = data.draw(st.lists(st.integers(0, 2), min_size=10, max_size=10))
    units = groups if estimator.needs_groups else range(len(rewards))
    parts = []
    for rank in range(3):
        mine = [i for i, unit in enumerate(units) if rank_of[unit] == rank]
        taken = [p for i in mine for p in penalties[i]] if penalise else None
        parts.append(
            (
                mine,
                [rewards[i] for i in mine],
                [groups[i] for i in mine],
                [len(penalties[i]) for i in mine],
                taken,
            )
        )
    played = [Episodes.checked(*part[1:]) for part in parts]
    known = [batch_moments(estimator, own) for own in played]
    sent = json.dumps([asdict(one) for one in known if one is not None])
    received = [Moments(**one) for one in json.loads(sent)]
    merged = reduce(Moments.merge, received) if received else None
    whole = run_by_episode(spec, *batch, penalise=penalise)
    for part, own in zip(parts, played, strict=True):
        found = by_episode(token_advantages(estimator, own, merged), part[3])
        for index, advantages in zip(part[0], found, strict=True):
            np.testing.assert_allclose(advantages, whole[index], rtol=1e-6, atol=1e-6)


@every_estimator
@given(batch=batches(), data=st.data())
def test_the_order_of_episodes_does_not_matter(
    spec: dict[str, Any], batch: Any, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch[0]))))
    straight = run_by_episode(spec, *batch)
    shuffled = run_by_episode(spec, *([part[i] for i in order] for part in batch))
    for place, index in enumerate(order):
        np.testing.assert_allclose(shuffled[place], straight[index], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize("reward", [0.1, -1.5, 0.0, 1e8])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    advantages = run(
        {"name": name}, [reward] * 7, [0, 0, 0, 1, 1, 1, 1], [[0.0] * 3] * 7, penalise=False
    )
    assert (advantages == 0.0).all()


@every_estimator
def test_one_episode_is_finite(spec: dict[str, Any]) -> None:
    advantages = run(spec, [-1.5], [7], [[0.0, 0.0]], penalise=False)
    expected = -1.5 if spec == {"name": "reinforce"} else 0.0
    assert advantages.tolist() == [expected, expected]


@every_estimator
def test_an_empty_batch(spec: dict[str, Any]) -> None:
    advantages = run(spec, [], [], [], penalise=False)
    assert advantages.shape == (0,)


@every_estimator
def test_an_episode_without_trained_tokens(spec: dict[str, Any]) -> None:
    advantages = run(spec, [1.0, 0.0, 2.0], [0, 0, 0], [[0.5, 0.25], [], [0.0]])
    assert advantages.shape == (3,)
    assert np.isfinite(advantages).all()


@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        ("grpo", lambda r: 3.0 * r + 5.0),
        ("reinforce_plus_plus", lambda r: 3.0 * r + 5.0),
        ("rloo", lambda r: r + 5.0),
        ("dr_grpo", lambda r: r + 5.0),
    ],
)
@given(batch=batches(penalised=False))
def test_what_does_not_change_an_advantage(
    name: str, invariant: Callable[[float], float], batch: Any
) -> None:
    rewards, groups, penalties = batch
    first = run({"name": name}, rewards, groups, penalties, penalise=False)
    second = run({"name": name}, list(map(invariant, rewards)), groups, penalties, penalise=False)
    # epsilon is in reward units: scaling is exact up to epsilon / std, here at most 1e-6 / 0.04.
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-7)


def test_long_episodes_count_more_in_reinforce_plus_plus() -> None:
    advantages = run(
        {"name": "reinforce_plus_plus"}, [1.0, 0.0], [0, 1], [[0.0] * 9, [0.0]], penalise=False
    )
    np.testing.assert_allclose(advantages, [1 / 3] * 9 + [-3.0])
    assert advantages.sum() == pytest.approx(0.0)


def test_bad_input_is_refused() -> None:
    estimator = ADVANTAGE_ESTIMATORS.build("grpo")
    good: list[Any] = [[1.0, 0.0], [0, 0], [2, 1], [0.1, 0.2, 0.3]]
    changes: list[tuple[int, Any, str]] = [
        (0, [1.0, float("inf")], "rewards must be finite"),
        (1, [0], "group ids must be 2 integers"),
        (2, [2, -1], "token counts must be 2"),
        (2, [2, 1, 4], "token counts must be 2"),
        (3, [0.1], "1 penalties for 3 trained tokens"),
        (3, [0.1, float("nan"), 0.0], "token penalties must be finite"),
    ]
    for place, value, message in changes:
        with pytest.raises(ValueError, match=message):
            compute_advantages(estimator, *[*good[:place], value, *good[place + 1 :]])


def test_missing_statistics_are_refused() -> None:
    plus_plus = ADVANTAGE_ESTIMATORS.build("reinforce_plus_plus")
    episodes = Episodes.checked([1.0, 0.0], [0, 0], [1, 1])
    with pytest.raises(ValueError, match="needs the batch moments"):
        token_advantages(plus_plus, episodes, None)
