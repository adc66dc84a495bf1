"""One rank of the `reference` worker group: scores samples with the frozen initial policy."""

from __future__ import annotations

import time
from typing import Any

from earl_core.cluster.context import WorkerContext
from earl_core.config import parse_config
from earl_core.dispatch.shards.manifest import parse_manifest
from earl_core.learner.data.samples import SCORED, training_samples, write_scores
from earl_core.learner.memory import Parking, guarded, peak_bytes, reset_peak
from earl_core.learner.parallel.mesh import MeshShape, create_mesh, leave_world
from earl_core.learner.update_worker import build_learner, rank_reader, state_tensors
from earl_core.selector import StageDeployment
from earl_core.system import fault_points
from earl_core.tensors.collectives import Ranks
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
        layout = StageDeployment.model_validate(deployment)
        self._mesh = create_mesh(MeshShape.of(layout))
        self._reader = rank_reader(context, self._config, run_directory)
        with guarded("reference"):
            self._learner = build_learner(self._config, layout, self._mesh)
        self._parking = Parking()

    def close(self) -> None:
        """Disconnect from the other ranks."""
        self._mesh.close()
        leave_world()

    @guarded("reference")
    def score(self, manifests: list[dict[str, Any]]) -> dict[str, Any]:
        """Write `reference_logprobs` for this replica's rows of the rollout's manifest."""
        started = time.perf_counter()
        reset_peak()
        parsed = [parse_manifest(manifest) for manifest in manifests]
        shards, tokens = [], 0
        with Ranks(self._mesh).do(lambda: self._reader.open(parsed, self._mesh, SCORED)) as batch:
            if self._mesh.leader and len(batch):
                entry = write_scores(
                    self._reader.store,
                    batch,
                    lambda samples, out: self._learner.score(samples, self._report, out),
                    stage="reference",
                    iteration=self._context.iteration or 0,
                    rank=self._context.rank,
                    schema=REFERENCE_SCHEMA,
                )
                shards, tokens = [entry.model_dump(mode="json")], sum(entry.row_lengths)
            else:
                # The other ranks of a replica compute their parts of the same rows; a replica
                # without rows takes part in what all do together.
                self._learner.score(training_samples(batch))
        fault_points.point("reference.written", self._context.iteration or 0)
        seconds = time.perf_counter() - started
        rate = tokens / max(seconds, 1e-9)
        metrics = {"seconds": seconds, "tokens_per_second": rate, **peak_bytes()}
        return {"shards": shards, "metrics": metrics, "weight": tokens}

    def offload(self) -> dict[str, Any]:
        """Give the device's memory back between stages; without a GPU it does nothing."""
        return {"bytes": self._parking.give(state_tensors(self._learner))}

    def reload(self) -> dict[str, Any]:
        """Take it again, before anything else is called."""
        self._parking.take()
        return {}

    def _report(self, done: int, samples: int) -> None:
        if self._context.rank == 0:
            self._context.report({"samples_done": done, "samples": samples})
