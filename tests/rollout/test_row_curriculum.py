"""Rows chosen by what their last groups say of the policy's success."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.experience.row_results import merge_rows, passes
from earl_core.rollout.row_curriculum import Posterior, horizon, results_of
from tests.calls import calls_of

ROWS = 7
COUNTS = st.lists(
    st.tuples(st.integers(0, 3 * ROWS), st.integers(0, 8), st.integers(0, 8)).map(
        lambda each: [each[0], each[1], each[1] + each[2]]
    ),
    max_size=6,
)
HISTORY = st.dictionaries(st.integers(0, 40), COUNTS, max_size=6)


def test_a_reward_at_the_bound_passes_however_it_was_rounded() -> None:
    for bound in (0.7, 0.9, 0.95, -0.3, 1e4 + 0.1):
        assert passes(float(np.float32(bound)), bound)
        assert not passes(bound - 1e-4 * max(1.0, abs(bound)), bound)
    assert passes(0.7 + 0.2 + 0.1, 1.0)


def posterior(history: dict[int, list[list[int]]], rows: int, memory: float) -> Posterior:
    return Posterior({age: results_of(each) for age, each in history.items()}, rows, memory)


@given(HISTORY, st.sampled_from([0.0, 0.5, 0.75]))
def test_a_posterior_counts_episodes_that_fade(
    history: dict[int, list[list[int]]], memory: float
) -> None:
    """Against exact sums, an episode at a time, and an iteration after the other."""
    alpha, beta = [Fraction(0)] * ROWS, [Fraction(0)] * ROWS
    for age in range(40, -1, -1):
        alpha = [Fraction(memory) * each for each in alpha]
        beta = [Fraction(memory) * each for each in beta]
        for row, solved, episodes in history.get(age, ()):
            for number in range(episodes):
                (alpha if number < solved else beta)[row % ROWS] += 1
    found = posterior(history, ROWS, memory)
    assert found.alpha == pytest.approx([float(1 + each) for each in alpha], rel=1e-12)
    assert found.beta == pytest.approx([float(1 + each) for each in beta], rel=1e-12)
    means = [(1 + a) / (2 + a + b) for a, b in zip(alpha, beta, strict=True)]
    assert found.expected([0, 0, 3]) == pytest.approx(float((2 * means[0] + means[3]) / 3))
    # What is as small as that leaves no trace in a double.
    traces = [a + b > 1e-9 for a, b in zip(alpha, beta, strict=True)]
    if all(a + b > 1e-9 or a + b == 0 for a, b in zip(alpha, beta, strict=True)):
        assert found.known == pytest.approx(sum(traces) / ROWS)


@given(HISTORY, st.integers(0, 2**40), st.integers(0, 10**6))
def test_a_ranking_has_each_row_once_and_is_the_same_again(
    history: dict[int, list[list[int]]], seed: int, iteration: int
) -> None:
    found = posterior(history, ROWS, 0.9)
    ranking = found.ranking(seed, iteration, "a").tolist()
    assert sorted(ranking) == list(range(ROWS))
    assert posterior(history, ROWS, 0.9).ranking(seed, iteration, "a").tolist() == ranking


def test_draws_differ_by_seed_iteration_and_label() -> None:
    found = Posterior({}, 50, 0.9)
    places = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]
    assert len({tuple(found.ranking(*each).tolist()) for each in places}) == 4
    # A numpy that draws otherwise would have runs go on with other rows.
    assert found.ranking(0, 0, "a")[:6].tolist() == PINNED


PINNED = [44, 45, 20, 24, 16, 8]


def nearer(one: tuple[float, float], other: tuple[float, float], steps: int = 4000) -> float:
    """The chance that a draw of one Beta is nearer to a half than one of another, by midpoints."""
    halves = (np.arange(steps) + 0.5) / steps / 2
    mass = []
    for a, b in (one, other):
        norm = math.gamma(a + b) / math.gamma(a) / math.gamma(b)
        density = [
            norm * sum(x ** (a - 1) * (1 - x) ** (b - 1) for x in (0.5 - d, 0.5 + d))
            for d in halves.tolist()
        ]
        mass.append(np.array(density) / steps / 2)
    beyond = 1 - np.cumsum(mass[1]) + mass[1] / 2
    return float(np.sum(mass[0] * beyond))


@pytest.mark.parametrize(
    ("one", "other"), [([4, 8], [0, 8]), ([4, 8], [0, 0]), ([1, 8], [8, 8]), ([3, 8], [20, 40])]
)
def test_a_row_goes_before_another_as_often_as_its_draw_is_nearer_to_a_half(
    one: list[int], other: list[int]
) -> None:
    found = posterior({0: [[0, *one], [1, *other]]}, 2, 0.9)
    first = sum(int(found.ranking(0, each, "")[0] == 0) for each in range(3000)) / 3000
    betas = [(1.0 + solved, 1.0 + episodes - solved) for solved, episodes in (one, other)]
    assert first == pytest.approx(nearer(*betas), abs=4 * math.sqrt(0.25 / 3000))


def test_no_row_is_starved() -> None:
    """One that was never solved in 800 episodes is drawn as a new one when it has not been played
    for as long as the horizon."""
    for memory in (0.0, 0.5, 0.98):
        reach = horizon(memory)
        assert memory**reach < 1e-3
        assert reach == 1 or memory ** (reach - 1) >= 1e-3 * (1 - 1e-9)
    hopeless = {age: [[0, 0, 8]] for age in range(100)}
    places = []
    for idle in (0, 200, 342):
        # Nine others are solved half of the time, until now.
        history = {age + idle: list(each) for age, each in hopeless.items()}
        for age in range(5):
            history.setdefault(age, []).extend([row, 4, 8] for row in range(1, 10))
        counting = {age: each for age, each in history.items() if age < horizon(0.98)}
        found = posterior(counting, 10, 0.98)
        firsts = [int(found.ranking(0, each, "")[0]) for each in range(2000)]
        places.append(Counter(firsts)[0])
    assert places[0] == 0 < places[1] < places[2]
    new = posterior({each: history[each] for each in range(5)}, 10, 0.98)
    assert (found.alpha[0], found.beta[0]) == (new.alpha[0], new.beta[0]) == (1, 1)


def test_parts_of_several_ranks_add_up() -> None:
    one = {"a": [[3, 1, 2], [5, 0, 1]], "b": [[0, 1, 1]]}
    other = {"a": [[5, 1, 3], [4, 0, 2]]}
    whole = {"a": [[3, 1, 2], [4, 0, 2], [5, 1, 4]], "b": [[0, 1, 1]]}
    assert merge_rows([one, other]) == merge_rows([other, one]) == whole
    assert merge_rows([]) == {}


def taught(rows: int, iterations: int, prompts: int, size: int, curriculum: bool) -> list[float]:
    """The share of groups whose rewards differ, by iteration, where a third of the rows is
    hopeless, a third is solved always, and the others' success is even between them."""
    chance = np.random.default_rng(7).permutation(
        np.r_[np.zeros(rows // 3), np.ones(rows // 3), np.linspace(0, 1, rows - 2 * (rows // 3))]
    )
    draws = np.random.default_rng(8)
    history: list[list[list[int]]] = []
    shares = []
    for iteration in range(iterations):
        if curriculum:
            recent = dict(enumerate(history[::-1][: horizon(0.98)]))
            chosen = posterior(recent, rows, 0.98).ranking(0, iteration, "")[:prompts]
        else:
            chosen = np.arange(iteration * prompts, (iteration + 1) * prompts) % rows
        solved = draws.binomial(size, chance[chosen])
        shares.append(float(np.mean((solved > 0) & (solved < size))))
        counts = zip(chosen.tolist(), solved.tolist(), strict=True)
        history.append([[row, right, size] for row, right in counts])
    return shares


def test_more_groups_teach_something_than_row_by_row() -> None:
    shares = {each: taught(600, 60, 32, 8, each) for each in (False, True)}
    late = {each: float(np.mean(shares[each][20:])) for each in shares}
    # Of even successes 7 of 9 groups of 8 differ, so that no more than a third of a pass does.
    assert late[False] == pytest.approx(7 / 27, abs=0.04)
    assert late[True] > 2.5 * late[False]
    assert np.mean(shares[True]) > 2 * np.mean(shares[False])


def test_a_million_rows_take_as_many_calls_as_a_few() -> None:
    rng = np.random.default_rng(0)
    history = {
        age: results_of([[int(row), 3, 8] for row in rng.integers(0, 10**6, 256)])
        for age in range(300)
    }
    rankings = []

    def rank(rows: int) -> int:
        return calls_of(
            lambda: rankings.append(Posterior(history, rows, 0.98).ranking(0, 1, "").size)
        )

    # The first time, modules are imported.
    assert rank(10) >= rank(10) == rank(10**6)
    assert rankings == [10, 10, 10**6]
