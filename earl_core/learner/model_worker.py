"""The part that ranks of the `update` and the `reference` worker group share: a mesh, a reader of
shards, a learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from transformers.utils import logging as transformers_logging

from earl_core.config import ConfigError, RunConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Batch, ShardEntry
from earl_core.learner.data.samples import RankReader, RowCost, Split, training_samples
from earl_core.learner.memory import Parking, guarded
from earl_core.learner.parallel.mesh import create_mesh, leave_world
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.worker import RunWorker
from earl_core.tensors.collectives import Ranks
from earl_core.tensors.slices import slices_of


class ModelWorker(RunWorker):
    """One rank of a group that holds the model."""

    stage: ClassVar[str]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._mesh = create_mesh(self._deployment, self._peers.memories(self._hosts))
        self._ranks = Ranks(self._mesh)
        self._reader = RankReader(self._reads(), self._hosts, _row_cost(self._model()))
        with guarded(self.stage):
            self._learner = self._build_learner()
        self._parking = Parking()

    def close(self) -> None:
        """Disconnect from the other ranks."""
        self._mesh.close()
        leave_world()

    def offload(self) -> dict[str, Any]:
        """Give the device's memory back between stages; without a GPU it does nothing."""
        held = []
        for learner in self._learners():
            held += [each.tensor for each in slices_of(learner.named_weights())]
            held += [t for entry in learner.optimizer.state.values() for t in entry.values()]
        return {"bytes": self._parking.give(held)}

    def reload(self) -> dict[str, Any]:
        """Take it again, before anything else is called."""
        self._parking.take()
        return {}

    def _open(
        self,
        manifests: list[dict[str, Any]],
        columns: Sequence[str],
        split: Split | None = None,
        link_bytes: float = 0.0,
        without: np.ndarray | None = None,
    ) -> Batch:
        """Open this rank's rows of the last manifest; see `RankReader.open`. An error is
        everyone's."""

        def read() -> Batch:
            sealed = self._manifests(manifests)
            return self._reader.open(sealed, self._mesh, columns, split, link_bytes, without)

        return self._ranks.do(read)

    def _publish_scores(
        self, batch: Batch, schema: pa.Schema, on_progress: Callable[[int, int], None] | None = None
    ) -> ShardEntry:
        """The model's log-probs of the batch's trained tokens as a completed shard.

        schema: `sample_id` and one token column, which is scored in place, so that nothing is
        copied. Raises `PoolFull` when the shard does not fit.
        """
        (name,) = (name for name in schema.names if name != "sample_id")
        store = self._reader.reads.store
        with store.create(
            stage=self.stage,
            iteration=self._context.iteration or 0,
            rank=self._context.rank,
            schema=schema,
            rows=len(batch),
            lengths={name: np.array([len(row) for row in batch.list_rows("tokens")], np.int64)},
        ) as writer:
            writer.values("sample_id")[:] = batch.rows
            self._logprobs(batch, on_progress, writer.rows(name))
            return store.complete(writer.seal())

    def _logprobs(
        self,
        batch: Batch,
        on_progress: Callable[[int, int], None] | None = None,
        out: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """The log-probs of the batch's trained tokens; as `PolicyLearner.score`."""
        return self._learner.score(training_samples(batch), on_progress, out)

    def _learners(self) -> list[PolicyLearner]:
        """Every model that the group holds."""
        return [self._learner]

    def _model(self) -> ModelConfig:
        """The first model that the group holds."""
        return self._config.initial_model

    def _build_learner(self) -> PolicyLearner:
        """The first learner."""
        return self._learner_of(self._model())

    def _learner_of(self, model: ModelConfig) -> PolicyLearner:
        """A learner as the deployment says, on this rank of the mesh."""
        transformers_logging.disable_progress_bar()
        config, deployment = self._config, self._deployment
        return PolicyLearner(
            model,
            update_settings(config, deployment),
            config.algorithm,
            temperature=config.rollout.temperature,
            iterations=config.iterations,
            seed=config.seed,
            imitation=config.imitation,
            mesh=self._mesh,
            logits_chunk_tokens=deployment.logits_chunk_tokens or None,
            offload_optimizer=deployment.offload_optimizer,
        )

    def _report(self, done: int, samples: int) -> None:
        if self._context.rank == 0:
            self._context.report({"samples_done": done, "samples": samples})


def update_settings(config: RunConfig, deployment: StageDeployment) -> UpdateConfig:
    """The run's settings of the update, with those that the deployment decides."""
    return config.update.model_copy(
        update={
            "threads": deployment.threads,
            "activation_checkpointing": deployment.activation_checkpointing,
            "max_tokens_per_microbatch": deployment.max_tokens_per_microbatch
            or config.update.max_tokens_per_microbatch,
        }
    )


def _row_cost(model: ModelConfig) -> RowCost:
    try:
        return RowCost.of(read_model_shape(Path(model.path)))
    except ConfigError:
        # A model whose numbers have other names is balanced by tokens.
        return RowCost()
