"""Turn-level credit: the policy gradient of a known chain, and GiGPO in plain Python."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.turns import Turns
from tests.algorithms.central import compute_advantages

STATES = 5
GO = np.array([0.8, -0.4, 0.3, 0.0, 0.5])
"""Logits of going on; in the last state it ends the chain, too."""
GO_REWARD, STOP_REWARD = (-0.5, 0.3, -0.2, 0.4, 3.0), (0.2, -1.0, 1.5, 0.0, -0.3)
GROUP, GROUPS = 4, 20_000

Game = list[tuple[int, bool, float]]
"""State, whether it went on, reward."""


def probability(state: int) -> float:
    return 1 / (1 + math.exp(-float(GO[state])))


def true_gradient() -> np.ndarray:
    """d E[return] / d logits: visits * pi * (1 - pi) * (Q(go) - Q(stop))."""
    value = 0.0
    gradient, values = np.zeros(STATES), [0.0] * (STATES + 1)
    for state in reversed(range(STATES)):
        go = probability(state)
        values[state] = go * (GO_REWARD[state] + values[state + 1])
        values[state] += (1 - go) * STOP_REWARD[state]
    visits = 1.0
    for state in range(STATES):
        go = probability(state)
        value = GO_REWARD[state] + values[state + 1] - STOP_REWARD[state]
        gradient[state] = visits * go * (1 - go) * value
        visits *= go
    return gradient


def play(chance: np.random.Generator) -> Game:
    game: Game = []
    for state in range(STATES):
        on = bool(chance.random() < probability(state))
        game.append((state, on, (GO_REWARD if on else STOP_REWARD)[state]))
        if not on:
            break
    return game


def turns_of(games: list[Game], tokens: int = 1) -> Turns:
    flat = [(index, turn) for index, game in enumerate(games) for turn in game]
    return Turns.checked(
        [turn[2] for _, turn in flat],
        [index for index, _ in flat],
        [tokens] * len(flat),
        [(index // GROUP, turn[0]) for index, turn in flat],
    )


def estimates(games: list[Game], advantages: np.ndarray) -> np.ndarray:
    """The gradient's estimate of each group, [GROUPS, STATES]."""
    found = np.zeros((len(games) // GROUP, STATES))
    for number, (index, turn) in enumerate(
        (index, turn) for index, game in enumerate(games) for turn in game
    ):
        state, on, _ = turn
        score = (1 - probability(state)) if on else -probability(state)
        found[index // GROUP, state] += score * advantages[number] / GROUP
    return found


@pytest.fixture(scope="module")
def games() -> list[Game]:
    chance = np.random.default_rng(0)
    return [play(chance) for _ in range(GROUP * GROUPS)]


def deviations(found: np.ndarray) -> np.ndarray:
    """From the true gradient, in standard errors."""
    error = found.std(axis=0, ddof=1) / math.sqrt(len(found))
    assert (error < 0.1 * np.abs(true_gradient()).max()).all(), "too few games to tell"
    return np.abs(found.mean(axis=0) - true_gradient()) / error


def test_the_estimates_mean_is_the_policy_gradient(games: list[Game]) -> None:
    turns = turns_of(games)
    estimator = ADVANTAGE_ESTIMATORS.build("turn_returns")
    rewards = [sum(turn[2] for turn in game) for game in games]
    counts = [len(game) for game in games]
    groups = np.arange(len(games)) // GROUP
    advantages = compute_advantages(estimator, rewards, groups, counts, turns=turns)
    assert deviations(estimates(games, advantages)).max() < 3.5


def test_a_baseline_for_each_turns_index_would_be_biased(games: list[Game]) -> None:
    """What the estimator does not do: the test above can tell."""
    returns = turns_of(games).returns(1.0)
    at = np.concatenate([np.arange(len(game)) for game in games])
    groups = np.repeat(np.arange(len(games)) // GROUP, [len(game) for game in games])
    key = groups * STATES + at
    counts = np.bincount(key, minlength=GROUPS * STATES)[key]
    means = np.bincount(key, weights=returns, minlength=GROUPS * STATES)[key] / counts
    scale = np.where(counts > 1, counts / np.maximum(counts - 1, 1), 1.0)
    assert deviations(estimates(games, scale * (returns - means))).max() > 6


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
    mean = statistics.fmean(each[0] for each in to_go)
    scale, wanted, left = len(counts) / (len(counts) - 1), [], penalties
    for returns, of_turns in zip(to_go, tokens, strict=True):
        mine, left = left[: sum(of_turns)], left[sum(of_turns) :]
        place = 0
        for value, count in zip(returns, of_turns, strict=True):
            for _ in range(count):
                wanted.append(scale * (value - sum(mine[place:]) - mean))
                place += 1
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
