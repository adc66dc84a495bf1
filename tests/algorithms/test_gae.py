"""Generalized advantages: closed forms on small MDPs, the recursion, and what changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earl_core.algorithms.advantage_batch import Episodes, token_advantages
from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.turns import Turns
from earl_core.system.errors import ConfigError


def advantages(
    values: list[float],
    counts: list[int],
    rewards: list[float],
    episodes: list[int] | None = None,
    penalties: list[float] | None = None,
    **parameters: object,
) -> np.ndarray:
    """Of turns with so many trained tokens and such rewards; by default of one episode."""
    of = np.array(episodes or [0] * len(counts))
    turns = Turns.checked(rewards, of, counts, list(range(len(counts))))
    number = int(of.max()) + 1
    given = Episodes.checked(
        np.bincount(of, rewards, minlength=number),
        np.arange(number),
        np.bincount(of, counts, minlength=number).astype(np.int64),
        penalties,
        turns,
        values,
    )
    estimator = ADVANTAGE_ESTIMATORS.build({"name": "gae", **parameters})
    return token_advantages(estimator, given, None)


def one_by_one(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The definition, as a double sum: sum over k of (gamma lam)^k d_{t+k}."""
    errors = rewards + gamma * np.append(values[1:], 0.0) - values
    return np.array(
        [
            sum((gamma * lam) ** k * errors[t + k] for k in range(len(errors) - t))
            for t in range(len(errors))
        ]
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_a_chain_that_pays_at_its_end(gamma: float, lam: float, length: int) -> None:
    """With V = c everywhere: every step but the last errs by (gamma - 1) c, the last by 1 - c."""
    c, ratio = 0.3, gamma * lam
    found = advantages([c] * length, [1] * length, [0.0] * (length - 1) + [1.0],
                       gamma=gamma, **{"lambda": lam})  # fmt: skip
    for t in range(length):
        n = length - 1 - t
        series = n if ratio == 1.0 else (1 - ratio**n) / (1 - ratio)
        wanted = (gamma - 1) * c * series + ratio**n * (1 - c)
        assert abs(found[t] - wanted) < 1e-12


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_the_true_values_leave_the_steps_own_surprise(lam: float) -> None:
    """In a deterministic MDP under V itself no step has an advantage, whatever lambda; where a step
    is a draw, its advantage is what was drawn less the mean, and no other step's changes."""
    gamma, rewards = 0.8, np.array([0.5, -1.0, 0.0, 2.0])
    values = np.zeros(5)
    for t in reversed(range(4)):
        values[t] = rewards[t] + gamma * values[t + 1]
    parameters = {"gamma": gamma, "lambda": lam}
    found = advantages(values[:4].tolist(), [1] * 4, rewards.tolist(), **parameters)
    np.testing.assert_allclose(found, 0.0, atol=1e-12)
    drawn = np.append(rewards[:3], 3.0)
    found = advantages(values[:4].tolist(), [1] * 4, drawn.tolist(), **parameters)
    np.testing.assert_allclose(found, (gamma * lam) ** np.arange(3.0, -1.0, -1.0), atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_steps(seed: int) -> None:
    """A turn's reward comes with its last token, penalties with their own; episodes are apart, and
    one without a trained token in between changes nothing."""
    random = np.random.default_rng(seed)
    gamma, lam = random.uniform(0.1, 1.0), random.uniform()
    counts = random.integers(1, 5, 9)
    episodes = np.repeat([0, 1, 3], [2, 4, 3])
    rewards, total = random.normal(size=9), int(counts.sum())
    values, penalties = random.normal(size=total), random.normal(size=total)
    found = advantages(
        values.tolist(), counts.tolist(), rewards.tolist(), episodes.tolist(),
        penalties.tolist(), gamma=gamma, **{"lambda": lam},
    )  # fmt: skip
    each = -penalties
    each[np.cumsum(counts) - 1] += rewards
    of_token = np.repeat(episodes, counts)
    for episode in (0, 1, 3):
        own = of_token == episode
        wanted = one_by_one(each[own], values[own], gamma, lam)
        np.testing.assert_allclose(found[own], wanted, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_steps(seed: int) -> None:
    """All tokens of a turn have its advantage, by the value before its first one."""
    random = np.random.default_rng(seed)
    gamma, lam = random.uniform(0.1, 1.0), random.uniform()
    counts, rewards = random.integers(1, 5, 6), random.normal(size=6)
    values = random.normal(size=int(counts.sum()))
    penalties = random.normal(size=len(values))
    found = advantages(
        values.tolist(), counts.tolist(), rewards.tolist(), None, penalties.tolist(),
        gamma=gamma, level="turn", **{"lambda": lam},
    )  # fmt: skip
    starts = np.cumsum(counts) - counts
    paid = rewards - np.add.reduceat(penalties, starts)
    wanted = one_by_one(paid, values[starts], gamma, lam)
    np.testing.assert_allclose(found, np.repeat(wanted, counts), atol=1e-12)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_a_turn_without_a_token_pays_the_one_before(level: str) -> None:
    """And one at the beginning of an episode pays nobody: nothing that was learnt had led to it."""
    parameters = {"level": level, "gamma": 0.9, "lambda": 0.7}
    values = [0.1, 0.2, 0.3, 0.4]
    given = advantages(values, [2, 0, 1, 1], [1.0, 5.0, 2.0, 3.0], [0, 0, 0, 1], **parameters)
    same = advantages(values, [2, 1, 1], [6.0, 2.0, 3.0], [0, 0, 1], **parameters)
    np.testing.assert_array_equal(given, same)
    first = advantages(values, [3, 0, 1], [1.0, 9.0, 3.0], [0, 1, 1], **parameters)
    np.testing.assert_array_equal(
        first, advantages(values, [3, 1], [1.0, 3.0], [0, 1], **parameters)
    )
    assert not advantages([], [0], [1.0], **parameters).size


@pytest.mark.parametrize("level", ["token", "turn"])
def test_what_leaves_advantages_as_they_are(level: str) -> None:
    """Episodes in another order; a potential that is added to values and paid by rewards."""
    random, gamma = np.random.default_rng(5), 0.9
    parameters = {"level": level, "gamma": gamma, "lambda": 0.8}
    counts = [1, 1, 1, 1, 1, 1, 1]
    values, rewards = random.normal(size=(2, 7))
    episodes = [0, 0, 0, 1, 1, 1, 1]
    found = advantages(values.tolist(), counts, rewards.tolist(), episodes, **parameters)
    turned = np.r_[3:7, 0:3]
    other = advantages(
        values[turned].tolist(), counts, rewards[turned].tolist(), [0] * 4 + [1] * 3, **parameters
    )
    np.testing.assert_array_equal(found[turned], other)
    potential = random.normal(size=7)
    after = np.append(potential[1:], 0.0)
    after[[2, 6]] = 0.0
    shaped = rewards + potential - gamma * after
    found_shaped = advantages(
        (values + potential).tolist(), counts, shaped.tolist(), episodes, **parameters
    )
    np.testing.assert_allclose(found_shaped, found, atol=1e-12)


def test_lambda_one_is_the_return_to_go_less_the_value() -> None:
    found = advantages([0.5, 0.25, 1.0], [2, 1], [1.0, 2.0], gamma=1.0, **{"lambda": 1.0})
    np.testing.assert_allclose(found, [2.5, 2.75, 1.0], atol=1e-12)


def test_parameters_and_inputs_are_checked() -> None:
    for wrong in ({"gamma": 0.0}, {"lambda": 1.5}, {"level": "episode"}, {"lam": 0.5}):
        with pytest.raises(ConfigError, match="gamma, lambda"):
            ADVANTAGE_ESTIMATORS.build({"name": "gae", **wrong})
    estimator = ADVANTAGE_ESTIMATORS.build({"name": "gae"})
    with pytest.raises(ValueError, match="values"):
        token_advantages(estimator, Episodes.checked([1.0], [0], [1]), None)
    with pytest.raises(ValueError, match="2 values for 1"):
        Episodes.checked([1.0], [0], [1], token_values=[0.0, 1.0])


def test_the_worked_example_of_the_page() -> None:
    """`docs/concepts/critic.md`: environment tokens are no steps; what they would be as such."""
    parameters = {"gamma": 0.9, "lambda": 0.5}
    values = [0.2, 0.4, 0.5, 0.8]
    found = advantages(values, [2, 2], [0.0, 1.0], **parameters)
    np.testing.assert_allclose(found, [0.245275, 0.1895, 0.31, 0.2], atol=1e-12)
    every = np.array([0.2, 0.4, 0.6, 0.6, 0.5, 0.8])
    steps = one_by_one(np.array([0.0, 0, 0, 0, 0, 1]), every, 0.9, 0.5)
    shown = [0.209893, 0.110874, -0.064725, -0.0105, 0.31, 0.2]
    np.testing.assert_allclose(steps, shown, atol=5e-7)
    turns = advantages(values, [2, 2], [0.0, 1.0], level="turn", **parameters)
    page = Path(__file__).parents[2] / "docs" / "concepts" / "critic.md"
    rows = [row.split("|")[2:-1] for row in page.read_text().splitlines() if row.startswith("| A ")]
    printed = [[float(cell) for cell in row if cell.strip()] for row in rows]
    for told, computed in zip(printed, [found, steps, turns], strict=True):
        np.testing.assert_allclose(told, computed, atol=5e-7)
