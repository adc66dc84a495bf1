"""One rank of the `reference` worker group, which holds frozen models."""

from __future__ import annotations

from earl_core.config.model import ModelConfig
from earl_core.learner.model_worker import ModelWorker
from earl_core.learner.policy_learner import PolicyLearner


class ReferenceWorker(ModelWorker):
    """Holds the references: the initial model or teachers. Their optimizers never get a state, so
    they cost nothing.

    The samples of an environment are scored by its own reference, those of environments without a
    penalty by none: their log-probs are 0.
    """

    stage = "reference"

    def _model(self) -> ModelConfig:
        return self._config.reference_model(self._config.references[0])

    def _build_learner(self) -> PolicyLearner:
        first = super()._build_learner()
        models = map(self._config.reference_model, self._config.references[1:])
        self._references = [first, *map(self._learner_of, models)]
        return first

    def _learners(self) -> list[PolicyLearner]:
        return self._references
