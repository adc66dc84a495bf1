"""The part that ranks of the worker groups `update`, `critic` and `reference` share: a mesh, a
reader of shards, a learner; and one rank of `reference`, which holds frozen models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from transformers.utils import logging as transformers_logging

from earl_core.config import ConfigError
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Batch, ShardEntry
from earl_core.experience.alike_groups import left_out_rows
from earl_core.learner.data.masks import masks_of
from earl_core.learner.data.samples import (
    LABEL,
    SCORED,
    RankReader,
    RowCost,
    Split,
    training_samples,
)
from earl_core.learner.loading import first_policy
from earl_core.learner.memory import Parking, guarded, peak_bytes, reset_peak
from earl_core.learner.microbatches import Algorithm
from earl_core.learner.parallel.mesh import create_mesh, leave_world
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.grammars import TokenMasks, check_library, grammars_of
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.worker import RunWorker
from earl_core.system import fault_points
from earl_core.tensors.collectives import Ranks
from earl_core.tensors.slices import slices_of
from earl_core.trajectory.schema import REFERENCE_SCHEMA


class ModelWorker(RunWorker):
    """One rank of a group that holds the model."""

    stage: ClassVar[str]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self._config.rollout.requests.constrained == "engine":
            check_library()
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

    def _masks(self, batch: Batch) -> list[TokenMasks | None]:
        """The masks of the batch's rows, by the policy's tokenizer. An error is everyone's."""
        model = self._config.initial_model
        make = partial(grammars_of, Path(model.path), model.trust_remote_code)
        return self._ranks.do(lambda: masks_of(batch, make))

    def _open(
        self,
        manifests: list[dict[str, Any]],
        columns: Sequence[str],
        split: Split | None = None,
        link_bytes: float = 0.0,
        without: np.ndarray | None = None,
    ) -> Batch:
        """This rank's rows of the last manifest; see `RankReader.open`. An error is everyone's."""

        def read() -> Batch:
            sealed = self._manifests(manifests)
            return self._reader.open(sealed, self._mesh, columns, split, link_bytes, without)

        return self._ranks.do(read)

    def score_reference(
        self, manifests: list[dict[str, Any]], link_bytes: float = 0.0
    ) -> dict[str, Any]:
        """Write `reference_logprobs` for this replica's rows of the rollout's manifest that are
        trained on. A learner's reference is the policy that it began with.

        manifests: a reference to it. link_bytes: see `Layout`.
        """
        columns = SCORED if self._config.one_penalty else (*SCORED, LABEL)
        with first_policy(self._learner.model, self._model().adapter):
            return self._scored(
                manifests,
                columns,
                link_bytes,
                REFERENCE_SCHEMA,
                "reference",
                self._reference_logprobs,
            )

    def _scored(
        self,
        manifests: list[dict[str, Any]],
        columns: Sequence[str],
        link_bytes: float,
        schema: pa.Schema,
        stage: str,
        scorer: Callable[..., list[np.ndarray]],
    ) -> dict[str, Any]:
        """Write the column of a stage that scores, for this replica's rows. columns: that are read.
        scorer: scores a batch, as `PolicyLearner.score` does samples."""
        started = time.perf_counter()
        reset_peak()
        shards, tokens = [], 0
        out = self._ranks.do(lambda: left_out_rows(self._manifests(manifests)[0]))
        with (
            guarded(stage),
            self._open(manifests, columns, None, link_bytes, without=out) as batch,
        ):
            score = partial(scorer, batch)
            if self._mesh.leader and len(batch):
                entry = self._publish_scores(batch, schema, stage, partial(score, self._report))
                shards, tokens = [entry.model_dump(mode="json")], sum(entry.row_lengths)
            else:
                # The other ranks of a replica compute their parts of the same rows; a replica
                # without rows takes part in what all do together.
                score()
        fault_points.point(f"{stage}.written", self._context.iteration or 0)
        seconds = time.perf_counter() - started
        rate = tokens / max(seconds, 1e-9)
        metrics = {
            "seconds": seconds,
            "tokens_per_second": rate,
            **peak_bytes(),
            **self._reader.reads.spent(),
        }
        return {"shards": shards, "metrics": metrics, "weight": tokens}

    def _reference_logprobs(
        self,
        batch: Batch,
        on_progress: Callable[[int, int], None] | None = None,
        out: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Score the samples of an environment by its own reference, and those of environments
        without a penalty by none: their log-probs are 0. As `PolicyLearner.score`."""
        config, samples = self._config, training_samples(batch, self._masks(batch))
        if config.one_penalty:
            return self._learner.score(samples, on_progress, out)
        scores = list(out or [np.empty(len(each.tokens), np.float32) for each in samples])
        for row in scores:
            row[:] = 0.0
        penalties = [config.penalty(label) for label in batch.strings(LABEL)]
        for text, learner in zip(config.references, self._learners(), strict=True):
            own = [
                row
                for row, each in enumerate(penalties)
                if each.coefficient and each.reference == text
            ]
            learner.score([samples[r] for r in own], on_progress, [scores[r] for r in own])
        return scores

    def _publish_scores(
        self,
        batch: Batch,
        schema: pa.Schema,
        stage: str,
        score: Callable[[Sequence[np.ndarray]], object],
    ) -> ShardEntry:
        """Log-probs of the batch's trained tokens as a completed shard of a stage.

        schema: `sample_id` and one token column. score: fills that column in place, so that nothing
        is copied. Raises `PoolFull` when the shard does not fit.
        """
        (name,) = (name for name in schema.names if name != "sample_id")
        store = self._reader.reads.store
        with store.create(
            stage=stage,
            iteration=self._context.iteration or 0,
            rank=self._context.rank,
            schema=schema,
            rows=len(batch),
            lengths={name: np.array([len(row) for row in batch.list_rows("tokens")], np.int64)},
        ) as writer:
            writer.values("sample_id")[:] = batch.rows
            score(writer.rows(name))
            return store.complete(writer.seal())

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
            self._settings(deployment),
            self._objective(),
            temperature=config.rollout.temperature,
            iterations=config.iterations,
            seed=config.seed,
            imitation=config.imitation,
            resting=self._resting,
            mesh=self._mesh,
            logits_chunk_tokens=deployment.logits_chunk_tokens or None,
            offload_optimizer=deployment.offload_optimizer,
        )

    def _objective(self) -> AlgorithmConfig | Algorithm:
        """What the learners are to do."""
        return self._config.algorithm

    def _settings(self, deployment: StageDeployment) -> UpdateConfig:
        """The run's settings of the update, with those that the deployment decides."""
        settings = self._config.update
        budget = deployment.max_tokens_per_microbatch or settings.max_tokens_per_microbatch
        return settings.model_copy(
            update={
                "threads": deployment.threads,
                "activation_checkpointing": deployment.activation_checkpointing,
                "max_tokens_per_microbatch": budget,
            }
        )

    @property
    def _resting(self) -> int:
        """How many of the first iterations leave the model as it is."""
        return 0

    def _report(self, done: int, samples: int) -> None:
        if self._context.rank == 0:
            self._context.report({"samples_done": done, "samples": samples})


def _row_cost(model: ModelConfig) -> RowCost:
    try:
        return RowCost.of(read_model_shape(Path(model.path)))
    except ConfigError:
        # A model whose numbers have other names is balanced by tokens.
        return RowCost()


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
