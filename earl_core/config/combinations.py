"""Settings of the sections `algorithm` and `rollout` that cannot work together."""

from __future__ import annotations

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.policy_losses import POLICY_LOSSES
from earl_core.config.algorithm import AlgorithmConfig


def check_algorithm(algorithm: AlgorithmConfig, group_size: int, charged: bool) -> bool:
    """Raise `ValueError` for parts of an algorithm that contradict each other, or the size of a
    group. charged: some episode pays a KL penalty.

    Returns whether the loss accounts for the policy that sampled; one of somebody's own that cannot
    be imported here is trusted.
    """
    estimator = ADVANTAGE_ESTIMATORS.checked(algorithm.advantage)
    loss = POLICY_LOSSES.checked(algorithm.policy_loss)
    AGGREGATIONS.checked(algorithm.aggregation)
    KL_ESTIMATORS.checked({"name": algorithm.kl.estimator})
    if estimator is not None and estimator.needs_groups and group_size < 2:
        raise ValueError(
            f"algorithm.advantage {algorithm.advantage['name']!r} compares the episodes of a "
            f"group, so rollout.group_size must be at least 2, not {group_size}; "
            "`reinforce` and `reinforce_plus_plus` work with 1"
        )
    corrected = algorithm.importance_correction is not None
    if loss is not None and loss.from_rollout and corrected:
        raise ValueError(
            f"algorithm.policy_loss {algorithm.policy_loss['name']!r} corrects for the "
            "engine's log-probs itself, so algorithm.importance_correction would do it twice: "
            "leave it out"
        )
    if (algorithm.kl.placement == "none") == charged:
        raise ValueError(
            "algorithm.kl.placement and algorithm.kl.coefficient contradict each other: set "
            "placement to `loss` or `reward` and a positive coefficient (of an environment's "
            "own kl, too), or neither"
        )
    return corrected or loss is None or loss.from_rollout
