"""Turn-level credit in plain Python; `tests/conformance` has its exact gradients."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.turns import Turns
from tests.algorithms.central import compute_advantages
from tests.conformance.chain import courses

GROUP = 4

Game = list[tuple[int, bool, float]]
"""State, whether it went on, reward."""


def play(chance: np.random.Generator) -> Game:
    course = courses()[chance.choice(6, p=[float(each.chance) for each in courses()])]
    return [
        (state, on, reward)
        for state, (on, reward) in enumerate(zip(course.went, course.rewards, strict=True))
    ]


def turns_of(games: list[Game], tokens: int = 1) -> Turns:
    flat = [(index, turn) for index, game in enumerate(games) for turn in game]
    return Turns.checked(
        [turn[2] for _, turn in flat],
        [index for index, _ in flat],
        [tokens] * len(flat),
        [(index // GROUP, turn[0]) for index, turn in flat],
    )


lengths = st.lists(st.integers(1, 4), min_size=2, max_size=6)


@given(lengths, st.data())
@settings(max_examples=100, deadline=None)
def test_turn_returns_in_plain_python(counts: list[int], data: st.DataObject) -> None:
    discount = data.draw(st.sampled_from([1.0, 0.9, 0.5]))
    rewards = [data.draw(st.lists(st.floats(-5, 5), min_size=n, max_size=n)) for n in counts]
    tokens = [[data.draw(st.integers(0, 3)) for _ in each] for each in rewards]
    penalties = [data.draw(st.floats(-1, 1)) for _ in range(sum(map(sum, tokens)))]
    flat = list(itertools.chain(*rewards))
    turns = Turns.checked(
        flat,
        [index for index, each in enumerate(rewards) for _ in each],
        list(itertools.chain(*tokens)),
        list(range(len(flat))),
    )
    estimator = ADVANTAGE_ESTIMATORS.build({"name": "turn_returns", "discount": discount})
    found = compute_advantages(
        estimator, list(map(sum, rewards)), [0] * len(counts), list(map(sum, tokens)),
        penalties, turns,
    )  # fmt: skip
    to_go = [
        [sum(discount**k * r for k, r in enumerate(each[t:])) for t in range(len(each))]
        for each in rewards
    ]
    left = iter(penalties)
    paid = [[next(left) for _ in range(sum(of_turns))] for of_turns in tokens]
    wholes = [returns[0] - sum(mine) for returns, mine in zip(to_go, paid, strict=True)]
    wanted = []
    for index, (returns, of_turns) in enumerate(zip(to_go, tokens, strict=True)):
        others, n = sum(wholes[:index] + wholes[index + 1 :]), len(counts)
        turn_of = [at for at, count in enumerate(of_turns) for _ in range(count)]
        for at, turn in enumerate(turn_of):
            # What came before the token stays in the mean that it is compared with.
            left_over = sum(paid[index][at:])
            before = wholes[index] - (discount**turn * returns[turn] - left_over)
            wanted.append(returns[turn] - left_over - (others + before) / (n - 1))
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("normalize", ["std", "none"])
def test_gigpo_in_plain_python(normalize: str) -> None:
    chance = np.random.default_rng(1)
    games = [play(chance) for _ in range(GROUP * 8)]
    options = {"name": "gigpo", "weight": 0.7, "discount": 0.9, "normalize": normalize}
    estimator: Any = ADVANTAGE_ESTIMATORS.build(options)
    rewards = [sum(turn[2] for turn in game) for game in games]
    groups = np.arange(len(games)) // GROUP
    counts = [2 * len(game) for game in games]
    found = compute_advantages(estimator, rewards, groups, counts, turns=turns_of(games, 2))

    def relative(value: float, among: list[float]) -> float:
        if len(among) == 1:
            return 0.0
        spread = statistics.stdev(among) + 1e-6 if normalize == "std" else 1.0
        return (value - statistics.fmean(among)) / spread

    anchored: dict[tuple[int, int], list[float]] = {}
    to_go: list[list[float]] = []
    for index, game in enumerate(games):
        own = [t[2] for t in game]
        returns = [sum(0.9**k * r for k, r in enumerate(own[t:])) for t in range(len(own))]
        to_go.append(returns)
        for (state, _, _), value in zip(game, returns, strict=True):
            anchored.setdefault((index // GROUP, state), []).append(value)
    wanted = []
    for index, game in enumerate(games):
        group = rewards[index // GROUP * GROUP : (index // GROUP + 1) * GROUP]
        for (state, _, _), value in zip(game, to_go[index], strict=True):
            step = relative(value, anchored[index // GROUP, state])
            wanted += [relative(rewards[index], group) + 0.7 * step] * 2
    assert found == pytest.approx(wanted, abs=1e-9)
    assert any(len(values) == 1 for values in anchored.values())
    assert any(len(values) > 1 for values in anchored.values())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        Turns.checked([1.0], [0, 0], [1], ["a"])
    with pytest.raises(ValueError, match="sort them by episode"):
        Turns.checked([1.0, 1.0], [1, 0], [1, 1], ["a", "b"])
    turns = Turns.checked([1.0], [0], [2], ["a"])
    with pytest.raises(ValueError, match="must be those of their episodes"):
        compute_advantages(ADVANTAGE_ESTIMATORS.build("gigpo"), [1.0], [0], [1], turns=turns)
