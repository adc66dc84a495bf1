"""Reinforcement-learning algorithms: pure functions of rewards and log-probabilities.

Importing this package imports no torch, so that configurations are checked without it. Each
family has a registry (``ADVANTAGE_ESTIMATORS``, ``POLICY_LOSSES``, ``KL_ESTIMATORS``,
``AGGREGATIONS``); adding a member touches the family's file only, or none if it is named by
import path.
"""

from __future__ import annotations

from earl_core.algorithms.advantage_batch import (
    BatchStatistics,
    apply_statistics,
    local_statistics,
)
from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from earl_core.algorithms.aggregation import AGGREGATIONS, Aggregation, Totals
from earl_core.algorithms.batch_filter import filter_episodes
from earl_core.algorithms.entropy import EntropyBonus
from earl_core.algorithms.importance import ImportanceCorrection, mismatch_metrics
from earl_core.algorithms.kl import KL_ESTIMATORS, KLEstimator
from earl_core.algorithms.mismatch import MismatchWatch, UpdateRefused
from earl_core.algorithms.moments import GroupedMoments, MomentArrays, Moments
from earl_core.algorithms.objective import MicrobatchLoss, Objective
from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs, PolicyLoss
from earl_core.algorithms.registry import Registered, Registry

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdvantageEstimator",
    "Aggregation",
    "BatchStatistics",
    "EntropyBonus",
    "GroupedMoments",
    "ImportanceCorrection",
    "KLEstimator",
    "LossInputs",
    "MicrobatchLoss",
    "MismatchWatch",
    "MomentArrays",
    "Moments",
    "Objective",
    "PolicyLoss",
    "Registered",
    "Registry",
    "Totals",
    "UpdateRefused",
    "apply_statistics",
    "filter_episodes",
    "local_statistics",
    "mismatch_metrics",
]
