"""Reinforcement-learning algorithms: pure functions of rewards and log-probabilities.

No module imports torch, so that configurations are checked without it. Each family has a registry
(``ADVANTAGE_ESTIMATORS``, ``POLICY_LOSSES``, ``KL_ESTIMATORS``, ``AGGREGATIONS``); adding a member
touches the family's file only, or none if it is named by import path.
"""
