"""The rank of the `reference` worker group: scores samples with the frozen initial policy."""

from __future__ import annotations

import time
from typing import Any

from earl_core.cluster.context import WorkerContext
from earl_core.config import parse_config
from earl_core.dispatch import Batch
from earl_core.dispatch.manifest import parse_manifest
from earl_core.learner.samples import write_scores
from earl_core.learner.worker import build_learner
from earl_core.run.shards import run_store
from earl_core.selector.deployment import StageDeployment
from earl_core.trajectory.schema import REFERENCE_SCHEMA


class ReferenceWorker:
    """Holds the initial model; its optimizer never gets a state, so it costs nothing."""

    def __init__(
        self,
        context: WorkerContext,
        deployment: dict[str, Any],
        *,
        config: dict[str, Any],
        run_directory: str,
    ) -> None:
        self._context = context
        self._config = parse_config(config)
        self._store = run_store(run_directory, self._config)
        self._learner = build_learner(self._config, StageDeployment.model_validate(deployment))

    def score(self, manifests: list[dict[str, Any]]) -> dict[str, Any]:
        """Write `reference_logprobs` for the rows of the rollout's manifest."""
        started = time.perf_counter()
        parsed = [parse_manifest(manifest) for manifest in manifests]
        verify = self._config.dispatch.verify == "always"
        with Batch(self._store, parsed, verify=verify) as batch:
            entry = write_scores(
                self._store,
                batch,
                lambda samples, out: self._learner.score(samples, self._report, out),
                stage="reference",
                iteration=self._context.iteration or 0,
                rank=self._context.rank,
                schema=REFERENCE_SCHEMA,
            )
        seconds = time.perf_counter() - started
        tokens = sum(entry.row_lengths)
        metrics = {"seconds": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
        return {"shards": [entry.model_dump(mode="json")], "metrics": metrics}

    def _report(self, done: int, samples: int) -> None:
        self._context.report({"samples_done": done, "samples": samples})
