"""A chain of five states in which the policy decides when to stop, and its exact gradients.

An episode goes on or stops in each state; stopping ends it, and so does the last state. It has six
courses, so that every expectation is a sum over all of them: nothing here is sampled.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

STATES = 5
GO = (Fraction(3, 4), Fraction(1, 2), Fraction(3, 4), Fraction(1, 2), Fraction(1, 2))
"""Probability of going on, in each state."""
REFERENCE_GO = (0.55, 0.7, 0.5, 0.35, 0.8)
GO_REWARD, STOP_REWARD = (-0.5, 0.3, -0.2, 0.4, 3.0), (0.2, -1.0, 1.5, 0.0, -0.3)
BETA = 0.4
"""Of the KL penalty."""


@dataclass(frozen=True)
class Course:
    """One way through the chain. chance: its probability. went: in each state that it saw."""

    chance: Fraction
    went: tuple[bool, ...]

    @property
    def rewards(self) -> list[float]:
        """Of each turn."""
        return [(GO_REWARD if on else STOP_REWARD)[at] for at, on in enumerate(self.went)]

    @property
    def logprobs(self) -> np.ndarray:
        """Of each turn under the policy."""
        return _logprobs([float(go) for go in GO], self.went)

    @property
    def reference_logprobs(self) -> np.ndarray:
        """Of each turn under the reference."""
        return _logprobs(REFERENCE_GO, self.went)

    @property
    def scores(self) -> np.ndarray:
        """d log pi / d logit of going on, of each turn."""
        return np.array([float(on) - float(GO[at]) for at, on in enumerate(self.went)])


def _logprobs(go: tuple[float, ...] | list[float], went: tuple[bool, ...]) -> np.ndarray:
    return np.log([go[at] if on else 1 - go[at] for at, on in enumerate(went)])


def courses() -> list[Course]:
    """All of them."""
    found, chance = [], Fraction(1)
    for state in range(STATES):
        went = (True,) * state
        found.append(Course(chance * (1 - GO[state]), (*went, False)))
        chance *= GO[state]
    return [*found, Course(chance, (True,) * STATES)]


def population() -> list[Course]:
    """Each course as often as it is likely: the means of this group are expectations."""
    whole = max(course.chance.denominator for course in courses())
    return [each for each in courses() for _ in range(int(each.chance * whole))]


def groups(size: int) -> list[tuple[float, tuple[Course, ...]]]:
    """All groups of so many episodes, with their probabilities."""
    drawn = itertools.product(courses(), repeat=size)
    return [(float(np.prod([each.chance for each in group])), group) for group in drawn]


def logits(go: tuple[float, ...] | None = None) -> torch.Tensor:
    """Of going on, float64 [STATES]."""
    values = torch.tensor([float(each) for each in (go or GO)], dtype=torch.float64)
    return (values / (1 - values)).log()


def gradient_of_return(beta: float = 0.0, discount: float = 1.0) -> np.ndarray:
    """d (E[sum of rewards] - beta * KL of whole episodes) / d logits, by autograd of the values.

    discount below 1: of what `turn_returns` follows, sum_t E[G_t grad log pi_t].
    """
    if discount != 1.0:
        found = np.zeros(STATES)
        for course in courses():
            to_go = 0.0
            for at in reversed(range(len(course.went))):
                to_go = course.rewards[at] + discount * to_go
                found[at] += float(course.chance) * to_go * course.scores[at]
        return found + (gradient_of_return(beta) - gradient_of_return())
    policy = logits().requires_grad_()
    value = policy.new_zeros(())
    for state in reversed(range(STATES)):
        go, other = policy[state].sigmoid(), torch.tensor(REFERENCE_GO[state]).double()
        on = GO_REWARD[state] - beta * (go / other).log() + value
        off = STOP_REWARD[state] - beta * ((1 - go) / (1 - other)).log()
        value = go * on + (1 - go) * off
    (gradient,) = torch.autograd.grad(value, policy)
    return np.asarray(gradient.numpy(), np.float64)


def gradient_of_divergences(to_policy: bool) -> np.ndarray:
    """sum_s visits(s) * d KL / d logits, of KL(policy || reference), or of the other direction
    (`to_policy`); the visits are held fixed, as a term of the loss holds them."""
    policy = logits().requires_grad_()
    total, visits = policy.new_zeros(()), 1.0
    for state in range(STATES):
        go, other = policy[state].sigmoid(), torch.tensor(REFERENCE_GO[state]).double()
        ours, theirs = torch.stack([go, 1 - go]), torch.stack([other, 1 - other])
        first, second = (theirs, ours) if to_policy else (ours, theirs)
        total = total + visits * (first * (first / second).log()).sum()
        visits *= float(GO[state])
    (found,) = torch.autograd.grad(total, policy)
    return np.asarray(found.numpy(), np.float64)
