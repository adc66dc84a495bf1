"""One rank of the `critic` worker group: holds the critic, says its values, trains it.

It is a learner like the update's, with another head and another loss; its state has the number of
the policy version beside which it was trained.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import reduce
from typing import Any

import numpy as np

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.moments import Moments
from earl_core.config.critic import CriticConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Batch
from earl_core.learner.data.samples import SCORED, by_minibatch
from earl_core.learner.data.value_samples import VALUED, value_samples
from earl_core.learner.update_worker import LearnerWorker, Rows
from earl_core.learner.value_regression import ValueRegression
from earl_core.tensors.collectives import Ranks
from earl_core.trajectory.schema import VALUES_SCHEMA


class CriticWorker(LearnerWorker):
    """Call `restore` first, then `score_values`, `update`, `save`, `reshard` in any order."""

    stage = "critic"

    @property
    def _critic(self) -> CriticConfig:
        assert self._config.critic is not None
        return self._config.critic

    @property
    def _in_turns(self) -> bool:
        return ADVANTAGE_ESTIMATORS.build(self._config.algorithm.advantage).acts_in_turns

    def score_values(
        self, manifests: list[dict[str, Any]], link_bytes: float = 0.0
    ) -> dict[str, Any]:
        """Write `values` for this replica's rows of the rollout's manifest that are trained on.

        manifests: a reference to it. link_bytes: see `Layout`.
        """
        return self._scored(manifests, SCORED, link_bytes, VALUES_SCHEMA, "value", self._values)

    def _values(self, batch: Batch, *given: Any) -> list[np.ndarray]:
        return self._learner.score(value_samples(batch, self._in_turns), *given)

    def _objective(self) -> ValueRegression:
        return ValueRegression(self._critic.clip)

    def _settings(self, deployment: StageDeployment) -> UpdateConfig:
        return self._critic.settings(super()._settings(deployment))

    @property
    def _resting(self) -> int:
        return 0

    def _rows(
        self,
        manifests: list[dict[str, Any]],
        iteration: int,
        link_bytes: float,
        leases: ExitStack,
        kl_factor: float,
    ) -> Rows:
        """Open the rows that it is trained on: all that have an advantage, and be it 0. kl_factor:
        of no meaning here."""
        steps, seed = self._learner.config.minibatches, self._seed(iteration)
        split = by_minibatch(steps, seed=seed, iteration=iteration)
        batch = leases.enter_context(self._open(manifests, VALUED, split, link_bytes))
        return Rows(value_samples(batch, self._in_turns), batch=batch)

    def _seen(self, rows: Rows, iteration: int) -> dict[str, float]:
        """How much of what the returns differ by the values had known, over all ranks' rows."""
        columns = []
        for sample in rows.samples:
            at, (old, errors) = sample.loss_mask != 0, (sample.values, sample.advantages)
            assert old is not None
            assert errors is not None
            columns.append(np.stack([old[at], errors[at]]).astype(np.float64))
        values, errors = np.concatenate([np.empty((2, 0)), *columns], axis=1)
        own = [asdict(Moments.from_values(each)) for each in (values, values + errors, errors)]
        every = Ranks(self._mesh, "data_parallel").gather_json(own)
        value, returned, error = (
            reduce(Moments.merge, (Moments(**rank) for rank in each))
            for each in zip(*every, strict=True)
        )
        metrics = {"value_mean": value.mean, "return_mean": returned.mean}
        if returned.count and returned.variance() > 0.0:
            metrics["explained_variance"] = 1.0 - error.variance() / returned.variance()
        return metrics
