"""Every advantage estimator with every placement of KL against the exact gradients of a chain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.aggregation import AGGREGATIONS, Totals
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.objective import Objective
from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from earl_core.algorithms.turns import Turns
from tests.algorithms.central import compute_advantages
from tests.conformance.chain import (
    BETA,
    REFERENCE_GO,
    STATES,
    Course,
    courses,
    gradient_of_divergences,
    gradient_of_return,
    groups,
    logits,
    population,
)

PLAIN_GIGPO = {"name": "gigpo", "normalize": "none", "discount": 1.0}
ESTIMATORS: list[Any] = [
    "reinforce",
    {"name": "reinforce", "baseline": "batch_mean"},
    "reinforce_plus_plus",
    "rloo",
    "grpo",
    "dr_grpo",
    "turn_returns",
    {"name": "turn_returns", "discount": 0.5},
    PLAIN_GIGPO,
    "gigpo",
]
every_estimator = pytest.mark.parametrize("spec", ESTIMATORS, ids=str)


def advantages(
    spec: Any, batch: Sequence[Sequence[Course]], kl: str | None = None, repeat: int = 1
) -> list[np.ndarray]:
    """Of each turn of each episode of these groups. repeat: trained tokens of a turn, of which the
    first is the one that the KL is of."""
    episodes = [(at, each) for at, group in enumerate(batch) for each in group]
    penalties = []
    for _, each in episodes:
        paid = np.zeros((len(each.went), repeat))
        if kl is not None:
            both = each.logprobs, each.reference_logprobs
            paid[:, 0] = BETA * KL_ESTIMATORS.build(kl).values(*both)
        penalties.append(paid.ravel())
    flat = [
        (reward, number, (group, state))
        for number, (group, each) in enumerate(episodes)
        for state, reward in enumerate(each.rewards)
    ]
    rewards, numbers, anchors = map(list, zip(*flat, strict=True))
    turns = Turns.checked(rewards, numbers, [repeat] * len(flat), anchors)
    estimator = ADVANTAGE_ESTIMATORS.build(spec)
    counts = [repeat * len(each.went) for _, each in episodes]
    found = compute_advantages(
        estimator,
        [sum(each.rewards) for _, each in episodes],
        [group for group, _ in episodes],
        counts,
        np.concatenate(penalties) if kl is not None else None,
        turns if estimator.turn_level else None,
    )
    return [part[::repeat] for part in np.split(found, np.cumsum(counts)[:-1])]


def estimate(episodes: Sequence[Course], values: Sequence[np.ndarray]) -> np.ndarray:
    """The gradient that a batch gives: the mean over its episodes, float64 [STATES]."""
    found = np.zeros(STATES)
    for course, advantage in zip(episodes, values, strict=True):
        found[: len(advantage)] += course.scores * advantage / len(episodes)
    return found


def expected(spec: Any, sizes: Sequence[int], kl: str | None = None) -> np.ndarray:
    """The mean of what all batches of groups of these sizes give, each by its probability."""
    found = np.zeros(STATES)
    if ADVANTAGE_ESTIMATORS.build(spec).needs_batch:
        for chance, episodes in groups(sum(sizes)):
            cuts = np.cumsum(sizes)[:-1].tolist()
            batch = [episodes[at:end] for at, end in itertools.pairwise([0, *cuts, sum(sizes)])]
            found += chance * estimate(episodes, advantages(spec, batch, kl))
        return found
    # Groups do not know of each other.
    drawn = [each for size in sizes for each in groups(size)]
    values = iter(advantages(spec, [group for _, group in drawn], kl))
    for chance, group in drawn:
        share = len(group) / sum(sizes)
        found += share * chance * estimate(group, [next(values) for _ in group])
    return found


@pytest.mark.parametrize("sizes", [[2], [3], [2, 3]], ids=str)
@pytest.mark.parametrize("kl", [None, "k1"])
@pytest.mark.parametrize("discount", [1.0, 0.9, 0.5])
def test_turn_returns_are_unbiased(sizes: list[int], kl: str | None, discount: float) -> None:
    spec = {"name": "turn_returns", "discount": discount}
    wanted = gradient_of_return(BETA if kl else 0.0, discount)
    assert np.abs(wanted).min() > 0.005
    np.testing.assert_allclose(expected(spec, sizes, kl), wanted, atol=1e-12)


@pytest.mark.parametrize("kl", [None, "k1"])
@pytest.mark.parametrize(
    ("spec", "sizes", "share"),
    [
        ("reinforce", [1], 1.0),
        ("reinforce", [1, 1], 1.0),
        ("rloo", [2], 1.0),
        ("rloo", [3], 1.0),
        ("rloo", [2, 3], 1.0),
        # An episode has a part in the mean that it is compared with.
        ({"name": "reinforce", "baseline": "batch_mean"}, [1, 2], 2 / 3),
        ("dr_grpo", [2], 1 / 2),
        ("dr_grpo", [3], 2 / 3),
        ({**PLAIN_GIGPO, "weight": 0.0}, [3], 2 / 3),
    ],
    ids=str,
)
def test_episode_level_estimators_are_unbiased_or_known_parts(
    spec: Any, sizes: list[int], share: float, kl: str | None
) -> None:
    wanted = share * gradient_of_return(BETA if kl else 0.0)
    np.testing.assert_allclose(expected(spec, sizes, kl), wanted, atol=1e-12)


def test_a_baseline_for_each_turns_index_would_be_biased() -> None:
    """What `turn_returns` does not do: who is left alone at a turn would learn nothing from it."""
    found = np.zeros(STATES)
    for chance, group in groups(3):
        to_go = [np.cumsum(each.rewards[::-1])[::-1] for each in group]
        values = []
        for own in to_go:
            values.append(own.copy())
            for at in range(len(own)):
                others = [of[at] for of in to_go if of is not own and at < len(of)]
                values[-1][at] -= sum(others) / len(others) if others else own[at]
        found += chance * estimate(group, values)
    assert np.abs(found - gradient_of_return()).max() > 0.05


@pytest.mark.parametrize("kl", ["k2", "k3"])
@pytest.mark.parametrize("spec", ["rloo", "turn_returns"])
def test_any_number_in_the_reward_counts_as_reward(spec: str, kl: str) -> None:
    """The penalties of k2 and k3 are numbers, from their token to the episode's end."""
    wanted = np.zeros(STATES)
    for course in courses():
        paid = BETA * KL_ESTIMATORS.build(kl).values(course.logprobs, course.reference_logprobs)
        value = sum(course.rewards) - paid.sum()
        wanted[: len(paid)] += float(course.chance) * value * course.scores
    np.testing.assert_allclose(expected(spec, [3], kl), wanted, atol=1e-12)


LIMITS = [
    spec
    for spec in ESTIMATORS
    # Their directions are others, as their docstrings say: later turns count for less, and each
    # anchor is divided by a spread of its own.
    if spec not in ("gigpo", {"name": "turn_returns", "discount": 0.5})
]


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("kl", [None, "k1"])
@pytest.mark.parametrize("spec", LIMITS, ids=str)
def test_where_groups_are_large_the_direction_is_exact(
    spec: Any, kl: str | None, repeat: int
) -> None:
    """On a group with every course as often as it is likely all baselines are expectations: what
    is left is the gradient, times a scale that rewards and penalties share."""
    whole = population()
    found = estimate(whole, advantages(spec, [whole], kl, repeat))
    wanted = gradient_of_return(BETA if kl else 0.0)
    scale = found @ wanted / (wanted @ wanted)
    assert scale > 0.1
    np.testing.assert_allclose(found, scale * wanted, atol=1e-9 * scale)


@every_estimator
def test_two_rewards_in_one_turn_are_one(spec: Any) -> None:
    """A penalty at the last token counts as that much less reward there, for every estimator."""
    rewards, paid = np.array([0.0, 0.0]), np.array([0.5, 0.0])

    def of(rewards: np.ndarray, penalties: np.ndarray | None) -> np.ndarray:
        turns = Turns.checked(rewards, [0, 1], [1, 1], ["same", "same"])
        estimator = ADVANTAGE_ESTIMATORS.build(spec)
        given = turns if estimator.turn_level else None
        return compute_advantages(estimator, rewards, [0, 0], [1, 1], penalties, given)

    found = of(rewards, paid)
    np.testing.assert_allclose(found, of(rewards - paid, None), atol=1e-12)
    assert np.abs(found).max() > 0.2
    if spec in ("rloo", "turn_returns"):
        assert found == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_sum", {"name": "constant", "length": 7}]
)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("spec", LIMITS, ids=str)
def test_kl_in_the_loss_pulls_by_its_coefficient(spec: Any, kl: str, aggregation: Any) -> None:
    """Whatever the advantages are divided by; k3 pulls in the other direction, as published."""
    whole = population()
    with_kl = gradient_of_loss(spec, whole, aggregation, kl)
    without = gradient_of_loss(spec, whole, aggregation, None)
    tokens = sum(len(each.went) for each in whole)
    name = aggregation if isinstance(aggregation, str) else "constant"
    per_episode = {"token_mean": len(whole) / tokens, "constant": 1 / 7}.get(name, 1.0)
    pulled = gradient_of_divergences(to_policy=kl == "k3")
    assert np.abs(pulled).max() > 0.02
    np.testing.assert_allclose(with_kl - without, per_episode * BETA * pulled, atol=3e-7)
    wanted = gradient_of_return()
    scale = -without @ wanted / (wanted @ wanted)
    np.testing.assert_allclose(-without, scale * wanted, atol=1e-6)


def gradient_of_loss(
    spec: Any, whole: Sequence[Course], aggregation: Any, kl: str | None
) -> np.ndarray:
    """By the training loss itself, in float32 as it is."""
    policy = logits().requires_grad_()
    objective = Objective(
        POLICY_LOSSES.build("policy_gradient"),
        AGGREGATIONS.build(aggregation),
        KL_ESTIMATORS.build(kl) if kl else None,
        BETA if kl else 0.0,
    )
    counts = torch.tensor([len(each.went) for each in whole])
    state = torch.tensor([at for each in whole for at in range(len(each.went))])
    went = torch.tensor([on for each in whole for on in each.went])

    def logprobs(values: torch.Tensor) -> torch.Tensor:
        signs = torch.where(went, 1.0, -1.0)
        return torch.nn.functional.logsigmoid(signs * values[state]).float()

    inputs = LossInputs(
        logprobs(policy),
        logprobs(policy).detach(),
        torch.from_numpy(np.concatenate(advantages(spec, [whole]))).float(),
        torch.arange(len(whole)).repeat_interleave(counts),
        len(whole),
    )
    result = objective.microbatch(
        inputs,
        counts,
        Totals.from_token_counts(counts.tolist()),
        reference_logprobs=logprobs(logits(REFERENCE_GO)),
    )
    (found,) = torch.autograd.grad(result.loss, policy)
    return np.asarray(found.numpy(), np.float64)
