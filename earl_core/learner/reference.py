"""One rank of the `reference` worker group: scores samples with frozen models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from earl_core.config.model import ModelConfig
from earl_core.dispatch import Batch
from earl_core.experience.alike_groups import left_out_rows
from earl_core.learner.data.samples import LABEL, SCORED, training_samples
from earl_core.learner.memory import guarded, peak_bytes, reset_peak
from earl_core.learner.model_worker import ModelWorker
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.system import fault_points
from earl_core.trajectory.schema import REFERENCE_SCHEMA


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

    def _logprobs(
        self,
        batch: Batch,
        on_progress: Callable[[int, int], None] | None = None,
        out: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        config, samples = self._config, training_samples(batch)
        if config.one_penalty:
            return self._learner.score(samples, on_progress, out)
        scores = list(out or [np.empty(len(each.tokens), np.float32) for each in samples])
        for row in scores:
            row[:] = 0.0
        penalties = [config.penalty(label) for label in batch.strings(LABEL)]
        for text, learner in zip(config.references, self._references, strict=True):
            own = [
                row
                for row, each in enumerate(penalties)
                if each.coefficient and each.reference == text
            ]
            learner.score([samples[r] for r in own], on_progress, [scores[r] for r in own])
        return scores

    @guarded("reference")
    def score(self, manifests: list[dict[str, Any]], link_bytes: float = 0.0) -> dict[str, Any]:
        """Write `reference_logprobs` for this replica's rows of the rollout's manifest that are
        trained on.

        manifests: a reference to it. link_bytes: see `Layout`.
        """
        started = time.perf_counter()
        reset_peak()
        shards, tokens = [], 0
        columns = SCORED if self._config.one_penalty else (*SCORED, LABEL)
        out = self._ranks.do(lambda: left_out_rows(self._manifests(manifests)[0]))
        with self._open(manifests, columns, None, link_bytes, without=out) as batch:
            if self._mesh.leader and len(batch):
                entry = self._publish_scores(batch, REFERENCE_SCHEMA, self._report)
                shards, tokens = [entry.model_dump(mode="json")], sum(entry.row_lengths)
            else:
                # The other ranks of a replica compute their parts of the same rows; a replica
                # without rows takes part in what all do together.
                self._logprobs(batch)
        fault_points.point("reference.written", self._context.iteration or 0)
        seconds = time.perf_counter() - started
        rate = tokens / max(seconds, 1e-9)
        metrics = {
            "seconds": seconds,
            "tokens_per_second": rate,
            **peak_bytes(),
            **self._reader.reads.spent(),
        }
        return {"shards": shards, "metrics": metrics, "weight": tokens}
