"""Advantage estimators: how good an episode (or token) was, compared with a baseline.

An estimator is two pure steps, so that computing it on many ranks gives what one place would give:

1. it says which statistics it needs (:attr:`~AdvantageEstimator.needs_groups`,
   :attr:`~AdvantageEstimator.needs_batch`, :attr:`~AdvantageEstimator.token_level`); these are
   moments, which ranks merge (:mod:`earl_core.algorithms.moments`);
2. it maps returns and merged statistics to advantages, element by element.

:mod:`earl_core.algorithms.advantage_batch` drives both steps. All numbers are float64, in reward
units before normalisation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from earl_core.algorithms.gae import Steps
from earl_core.algorithms.moments import Float64Array, MomentArrays, Moments, group_moments
from earl_core.algorithms.registry import Registered, Registry
from earl_core.algorithms.turns import Turns

_Statistic = TypeVar("_Statistic", Moments, MomentArrays)
PositiveFloat = Annotated[float, Field(gt=0.0)]
Discount = Annotated[float, Field(gt=0.0, le=1.0)]


class AdvantageEstimator(Registered, ABC):
    """Interface of every advantage estimator."""

    needs_groups: ClassVar[bool] = False
    """True where an episode is compared with its group, which then needs two episodes."""

    leaves_out: ClassVar[bool] = False
    """True where the moments that a return is compared with leave this return out: those of the
    group's others are then given.

    A baseline that holds the return which is compared with it takes a share of the gradient away.
    The part of a token's return to leave out is the one that the episode's return contains
    (:meth:`turn_parts`), less the penalties from the token on; only the means of the moments then
    say anything.
    """

    token_level: ClassVar[bool] = False
    """True where each trained token has a return of its own.

    False: one return per episode (penalties of its tokens summed), batch moments over episodes.
    True: a token's return is the episode's reward less the penalties from this token on, batch
    moments over trained tokens.
    """

    turn_level: ClassVar[bool] = False
    """True where the turns of an episode differ: the estimator then gets their rewards.

    A token-level estimator's return is that of the token's turn, :meth:`turn_returns`, less the
    penalties from the token on; the groups' moments are over the episodes' first turns, less all
    penalties. For others :meth:`turn_terms` is added to the episode's advantage, of turns whose
    rewards pay their penalties.
    """

    needs_values: ClassVar[bool] = False
    """True where returns are relative to a critic's values: :meth:`relative_returns`. The run then
    needs a critic."""

    @property
    def acts_in_turns(self) -> bool:
        """True where a time step is a turn: the critic is then asked about, and trained on, the
        first trained token of each alone."""
        return False

    @property
    def needs_batch(self) -> bool:
        """True where the estimator needs the moments of the whole batch."""
        return False

    def relative_returns(
        self, turns: Turns, penalties: Float64Array | None, values: Float64Array
    ) -> Float64Array:
        """Return of each trained token less its value, [T]. penalties, values: [T]."""
        raise NotImplementedError

    def turn_returns(self, turns: Turns) -> Float64Array:
        """Return of each turn, [N]."""
        return turns.returns(1.0)

    def turn_parts(self, turns: Turns) -> Float64Array:
        """Part of each turn's return that the return of the episode's first turn contains, [N]."""
        return self.turn_returns(turns)

    def turn_terms(self, turns: Turns) -> Float64Array:
        """Difference between each turn's advantage and its episode's, [N]."""
        return np.zeros(len(turns.rewards))

    @abstractmethod
    def advantages(
        self, returns: Float64Array, groups: MomentArrays | None, batch: Moments | None
    ) -> Float64Array:
        """Advantages float64 [N] of ``returns`` float64 [N], element by element.

        Args:
            returns: One for each episode, or for each trained token if :attr:`token_level`.
            groups: Moments of each element's group, aligned to ``returns``; given if
                ``needs_groups``.
            batch: Moments of the batch, in a mixture of those episodes of it that are of the same
                environment as these; given if ``needs_batch``.
        """


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    AdvantageEstimator,  # type: ignore[type-abstract]
)


def _given(statistic: _Statistic | None, what: str) -> _Statistic:
    if statistic is None:
        raise ValueError(f"This advantage estimator needs the {what} moments; pass them.")
    return statistic


@ADVANTAGE_ESTIMATORS.register("reinforce")
class Reinforce(AdvantageEstimator):
    """A = R - b (Williams 1992).

    Attributes:
        baseline: ``none`` (b = 0), or ``batch_mean`` (b = mean return of the batch's episodes).
    """

    baseline: Literal["none", "batch_mean"] = "none"

    @property
    def needs_batch(self) -> bool:
        return self.baseline == "batch_mean"

    def advantages(
        self, returns: Float64Array, groups: MomentArrays | None, batch: Moments | None
    ) -> Float64Array:
        if self.baseline == "none":
            return returns.copy()
        return returns - _given(batch, "batch").mean


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus")
class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++ (arXiv 2501.03262), the variant without a group baseline: global normalisation.

    The paper's token return ``A_t = r - beta * sum_{i>=t} KL_i``, followed by its global
    advantage normalisation ``(A_t - mean) / std``, mean and std over all trained tokens of the
    batch. Without penalties all tokens of an episode share ``A = r``, and the moments are those
    of the rewards, each counted once per trained token of its episode: the same equation.

    The std is the population std (ddof 0) with its variance bounded below by ``epsilon ** 2``, as
    in the authors' OpenRLHF, where that bound is 1e-8. Equal returns give exactly 0.

    Attributes:
        epsilon: Lower bound of the standard deviation by which is divided, in reward units.
    """

    epsilon: PositiveFloat = 1e-4

    @property
    def needs_batch(self) -> bool:
        return True

    token_level = True

    def advantages(
        self, returns: Float64Array, groups: MomentArrays | None, batch: Moments | None
    ) -> Float64Array:
        moments = _given(batch, "batch")
        return (returns - moments.mean) / max(math.sqrt(moments.variance()), self.epsilon)


@ADVANTAGE_ESTIMATORS.register("rloo")
class LeaveOneOut(AdvantageEstimator):
    """RLOO (arXiv 2402.14740): A = R - mean of the other returns of the group.

    An episode alone in its group has no others and gets 0.
    """

    needs_groups = True
    leaves_out = True

    def advantages(
        self, returns: Float64Array, groups: MomentArrays | None, batch: Moments | None
    ) -> Float64Array:
        return returns - _given(groups, "group").means


@ADVANTAGE_ESTIMATORS.register("grpo")
class GroupRelative(AdvantageEstimator):
    """GRPO (arXiv 2402.03300): A = (R - mean) / (std + epsilon) within the group.

    The std is the sample std (ddof 1), as in TRL and verl. ``epsilon`` is verl's 1e-6 by default;
    TRL uses 1e-4. Equal returns give exactly 0, and so does an episode alone in its group.

    Attributes:
        epsilon: Added to the standard deviation, in reward units.
    """

    epsilon: PositiveFloat = 1e-6

    needs_groups = True

    def advantages(
        self, returns: Float64Array, groups: MomentArrays | None, batch: Moments | None
    ) -> Float64Array:
        group = _given(groups, "group")
        return (returns - group.means) / (group.std(ddof=1) + self.epsilon)


@ADVANTAGE_ESTIMATORS.register("dr_grpo")
class DoctorGroupRelative(AdvantageEstimator):
    """Dr. GRPO (arXiv 2503.20783): A = R - mean within the group, without dividing by the std.

    The paper pairs it with the ``constant`` aggregation, which is configured separately.
    """

    needs_groups = True

    def advantages(
        self, returns: Float64Array, groups: MomentArrays | None, batch: Moments | None
    ) -> Float64Array:
        return returns - _given(groups, "group").means


@ADVANTAGE_ESTIMATORS.register("turn_returns")
class TurnReturns(LeaveOneOut):
    """Return to go of each turn less one baseline for the group: A_t = n/(n-1) (G_t - mean G_0).

    G_t is the discounted sum of the rewards from turn t on, less the penalties from the token on;
    the mean is over the group's first turns, as in RLOO. The factor puts back what G_t itself has
    in it, so that the mean of sum_t A_t grad log pi_t is that of G_t alone. With a discount d it
    has less: A_t = ((n - 1 + d^t) G_t - n mean G_0) / (n - 1), the penalties undiscounted. A
    baseline for each turn's index would leave nothing to learn to the last one that plays, which is
    a bias where the policy decides when to stop. With a discount below 1 later turns count for less
    than in the gradient of the plain return.

    Attributes:
        discount: Discount factor of a reward for each turn that it comes later.
    """

    discount: Discount = 1.0

    token_level = True
    turn_level = True

    def turn_returns(self, turns: Turns) -> Float64Array:
        return turns.returns(self.discount)

    def turn_parts(self, turns: Turns) -> Float64Array:
        return self.discount**turns.places * turns.returns(self.discount)


@ADVANTAGE_ESTIMATORS.register("gigpo")
class GroupInGroup(GroupRelative):
    """GiGPO (arXiv 2505.10978): A_t = A_E + weight * A_S, relative to two groups.

    A_E is GRPO's advantage of the episode. A_S compares the turn's discounted return to go with
    those of all turns of the group that answered the same observation (its *anchor*): the same new
    messages, whatever the chat template makes of them. A turn whose observation nobody else had
    gets A_S = 0. With KL in the reward turns pay their penalties, so both parts are of one return.

    Attributes:
        weight: Weight of A_S.
        discount: Discount factor in A_S of a reward for each turn that it comes later.
        normalize: ``std``: both are divided by the sample std of their group, plus ``epsilon``;
            ``none``: neither is.
    """

    weight: Annotated[float, Field(ge=0.0)] = 1.0
    discount: Discount = 0.95
    normalize: Literal["std", "none"] = "std"

    turn_level = True

    def advantages(
        self, returns: Float64Array, groups: MomentArrays | None, batch: Moments | None
    ) -> Float64Array:
        return self._compared(returns, _given(groups, "group"))

    def turn_parts(self, turns: Turns) -> Float64Array:
        """Part of each turn's return that the return of the episode's first turn contains, [N]."""
        return self.turn_returns(turns)

    def turn_terms(self, turns: Turns) -> Float64Array:
        returns = turns.returns(self.discount)
        return self.weight * self._compared(returns, group_moments(returns, turns.anchors))

    def _compared(self, returns: Float64Array, group: MomentArrays) -> Float64Array:
        difference = returns - group.means
        return difference / (group.std(ddof=1) + self.epsilon if self.normalize == "std" else 1.0)


@ADVANTAGE_ESTIMATORS.register("gae")
class GeneralizedAdvantage(AdvantageEstimator):
    """Generalized advantage estimation (arXiv 1506.02438): the critic's errors, summed up with
    weights (gamma * lambda)^k.

    See :mod:`earl_core.algorithms.gae` for what a time step is. Advantages are not normalised.

    Attributes:
        gamma: Discount factor of what comes a time step later.
        lambda: Weight of what was returned against what the critic expected: 1: A_t is the return
            to go less the value, without the critic's bias; 0: one step, then the critic's word.
        level: ``token``: a time step is a trained token; ``turn``: a turn, whose tokens share its
            advantage, and whose value is the critic's before the first of them.
    """

    gamma: Discount = 1.0
    lam: Annotated[float, Field(ge=0.0, le=1.0, alias="lambda")] = 0.95
    level: Literal["token", "turn"] = "token"

    needs_values = True
    token_level = True
    turn_level = True

    @property
    def acts_in_turns(self) -> bool:
        return self.level == "turn"

    def relative_returns(
        self, turns: Turns, penalties: Float64Array | None, values: Float64Array
    ) -> Float64Array:
        """Return of each trained token less its value, [T]. penalties, values: [T]."""
        make = Steps.of_turns if self.acts_in_turns else Steps.of_tokens
        steps = make(turns, penalties, values)
        return np.repeat(steps.advantages(self.gamma, self.lam), steps.token_counts)

    def advantages(
        self, returns: Float64Array, groups: MomentArrays | None, batch: Moments | None
    ) -> Float64Array:
        return returns.copy()
