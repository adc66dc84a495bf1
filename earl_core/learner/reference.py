"""One rank of the `reference` worker group: scores samples with the frozen initial policy."""

from __future__ import annotations

import time
from typing import Any

from earl_core.experience.alike_groups import left_out_rows
from earl_core.learner.data.samples import SCORED, training_samples
from earl_core.learner.memory import guarded, peak_bytes, reset_peak
from earl_core.learner.model_worker import ModelWorker
from earl_core.system import fault_points
from earl_core.trajectory.schema import REFERENCE_SCHEMA


class ReferenceWorker(ModelWorker):
    """Holds the initial model; its optimizer never gets a state, so it costs nothing."""

    stage = "reference"

    @guarded("reference")
    def score(self, manifests: list[dict[str, Any]], link_bytes: float = 0.0) -> dict[str, Any]:
        """Write `reference_logprobs` for this replica's rows of the rollout's manifest that are
        trained on.

        manifests: a reference to it. link_bytes: see `Layout`.
        """
        started = time.perf_counter()
        reset_peak()
        shards, tokens = [], 0
        out = self._ranks.do(lambda: left_out_rows(self._manifests(manifests)[0]))
        with self._open(manifests, SCORED, None, link_bytes, without=out) as batch:
            if self._mesh.leader and len(batch):
                entry = self._publish_scores(batch, REFERENCE_SCHEMA, self._report)
                shards, tokens = [entry.model_dump(mode="json")], sum(entry.row_lengths)
            else:
                # The other ranks of a replica compute their parts of the same rows; a replica
                # without rows takes part in what all do together.
                self._learner.score(training_samples(batch))
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
