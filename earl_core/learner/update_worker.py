"""One rank of the `update` worker group: holds the training state, applies each update once.

The state has a policy version, the number of updates in it. From the first optimizer step of an
update to its seal the state is dirty: it is neither the old version nor the new one on disk. A
dirty state reloads what was last restored or saved before anything else; one that applied an
update but could not save it only saves.

All methods are collective: every rank of the group gets the same call and goes through it alike.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from earl_core.algorithms.importance import ImportanceCorrection, too_small
from earl_core.algorithms.mismatch import UpdateRefused
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Batch, Manifest, ShardEntry
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.prefixes import candidates, chosen
from earl_core.learner.data.samples import (
    LABEL,
    TRAINED,
    by_minibatch,
    recorded_routing,
    training_samples,
)
from earl_core.learner.data.staleness import age_metrics, importance_metrics
from earl_core.learner.data.zero_advantage import ADVANTAGES, Skipped, advantage_table, choose
from earl_core.learner.measure_update import measure_training
from earl_core.learner.memory import guarded, guarded_stage
from earl_core.learner.model_worker import ModelWorker
from earl_core.learner.reshard import reshard
from earl_core.run.policy_versions import INITIAL_VERSION, assigned
from earl_core.system import fault_points
from earl_core.system.errors import EarlError
from earl_core.system.memory import give_back_free_memory
from earl_core.tensors.collectives import Ranks
from earl_core.tensors.hashing import digest_of
from earl_core.tensors.slices import slices_of
from earl_core.trajectory.routing import RecordedRouting
from earl_core.trajectory.schema import OLD_LOGPROBS_SCHEMA
from earl_core.weights.manifest import config_digest
from earl_core.weights.probe import PREFIXES, Prefixes
from earl_core.weights.publish import publish

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """A rank's rows of an update. skipped: those that nobody computes. shards: of the scores that
    were written. batch: the rows came from; None: there are none. routing: of each row."""

    samples: list[TrainingSample] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    shards: list[ShardEntry] = field(default_factory=list)
    batch: Batch | None = None
    routing: list[RecordedRouting | None] = field(default_factory=list)

    def close(self) -> float:
        """Let go of the views, which must be gone before the batch gives its leases back; returns
        the bytes that were read of the routing."""
        read = sum(each.read_bytes for each in self.routing if each is not None)
        self.samples.clear()
        self.routing.clear()
        return float(read)


class LearnerWorker(ModelWorker):
    """Call `restore` first, then `update`, `publish`, `save`, `reshard` and itself in any order."""

    stage = "update"

    _version = INITIAL_VERSION
    _dirty = False
    _restored: Path | None = None
    _applied: dict[str, Any] | None = None

    @cached_property
    def _config_digest(self) -> str:
        model = self._config.initial_model
        return config_digest(Path(model.path), model.trust_remote_code)

    @guarded_stage
    def restore(self, checkpoint: str | None) -> dict[str, Any]:
        """Take the state of a checkpoint; None: the initial model, which is loaded already. Raises
        before anything is played what would keep the next checkpoint from being written."""
        path = Path(checkpoint) if checkpoint else None
        # Whatever the first checkpoint lacks is said before the first rollout.
        self._learner.try_saving(self._run_directory / "checkpoints")
        if path is not None:
            state = self._learner.restore(path)
            self._version = int(state["policy_version"])
        elif self._version or self._dirty:
            self._learner = self._build_learner()
            self._version = INITIAL_VERSION
        self._restored, self._dirty, self._applied = path, False, None
        return {"policy_version": self._version}

    @guarded_stage
    def update(
        self,
        manifests: list[dict[str, Any]],
        checkpoint: str | None,
        record: dict[str, Any],
        link_bytes: float = 0.0,
        rate_factor: float = 1.0,
        kl_factor: float = 1.0,
    ) -> dict[str, Any]:
        """Apply the iteration's update to its assigned version, once; write `checkpoint` if given.

        manifests: references to the rollout's, the reference's if there is one, and last the
        advantage's; or to that of demonstrations alone. link_bytes: see `Layout`. rate_factor,
        kl_factor: of the learning rate, and of the KL coefficients in the loss.
        Returns the new policy version, the weights' digest, metrics, the shards this rank wrote,
        `prefixes` of the batch for the probe of the new version, and how many steps were applied
        in this call (0 when an earlier call had applied them).
        """
        iteration = self._context.iteration or 0
        trained, made = assigned(iteration)
        steps = 0
        if self._dirty:
            self._go_back()
        if self._applied is None or self._version != made:
            if self._version != trained:
                raise EarlError(
                    f"iteration {iteration} updates policy version {trained}, but the learner "
                    f"holds version {self._version}: resume the run from its last checkpoint"
                )
            steps = self._apply(manifests, iteration, link_bytes, rate_factor, kl_factor)
        assert self._applied is not None
        if checkpoint is not None:
            self._save(Path(checkpoint), iteration, record)
        return {**self._applied, "steps_applied": steps}

    @guarded("publish")
    def publish(
        self,
        directory: str,
        policy_version: int,
        dtype: str,
        prefixes: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        """Write the weights into shared memory; returns the dumped `WeightsManifest`. prefixes:
        dumped `Prefixes`, after which the manifest's probe says the likeliest tokens."""
        if self._dirty or policy_version != self._version:
            raise EarlError(
                f"policy version {policy_version} was asked for, but the learner holds version "
                f"{self._version}{' in the middle of an update' if self._dirty else ''}"
            )
        self._point("publish.write", self._context.iteration or 0)
        manifest = publish(
            self._learner.parallel.published,
            Path(directory),
            policy_version,
            dtype,
            config_digest=self._config_digest,
            adapter=self._learner.parallel.adapter,
            mesh=self._mesh,
        )
        probe = self._learner.probe([Prefixes.model_validate(each) for each in prefixes])
        return manifest.model_copy(update={"probe": probe}).model_dump(mode="json")

    @guarded_stage
    def save(self, directory: str) -> dict[str, Any]:
        """Write the state where other ranks will `restore` it from; it stays as it is."""
        self._require_clean("be handed over")
        self._learner.save(Path(directory), {"policy_version": self._version})
        return {"policy_version": self._version}

    @guarded_stage
    def reshard(self, deployment: dict[str, Any]) -> dict[str, Any]:
        """Change the mesh of the live state, bit for bit, and the other settings of the deployment.

        Raises `EarlError` for a dirty state, `ConfigError` for a mesh that does not fit the model.
        """
        self._require_clean("be resharded")
        wanted = StageDeployment(**deployment)
        self._parking.take()
        moved = reshard(self._learner, wanted, self._settings(wanted))
        self._deployment, self._mesh = wanted, self._learner.mesh
        self._ranks = Ranks(self._mesh)
        return {"policy_version": self._version, **moved}

    @guarded_stage
    def measure(self, context: int, samples: int, scoring: bool = False) -> dict[str, float]:
        """Measure a stage of so many samples, as `measure_update.measure_training` does. Raises
        `EarlError` for a learner that is not the initial model as it was loaded."""
        self._require_clean("be measured")
        if self._version or self._restored is not None:
            raise EarlError(
                f"the learner holds version {self._version} of a run: measure one of its own"
            )
        return measure_training(self._learner, self._config, context, samples, scoring=scoring)

    def _require_clean(self, purpose: str) -> None:
        if self._dirty:
            raise EarlError(
                f"the learner is in the middle of the update of policy version {self._version} "
                f"and cannot {purpose}: rebuild the group from the last checkpoint"
            )

    def _go_back(self) -> None:
        logger.warning("the last update was cut off: going back to the last saved state")
        if self._restored is not None and not self._restored.exists():
            raise EarlError(
                f"the last update was cut off, and the state before it, {self._restored}, is gone: "
                "resume the run from its last checkpoint"
            )
        self.restore(str(self._restored) if self._restored else None)

    def _apply(
        self,
        manifests: list[dict[str, Any]],
        iteration: int,
        link_bytes: float,
        rate_factor: float,
        kl_factor: float,
    ) -> int:
        started = time.perf_counter()
        steps = 0

        def on_step(index: int) -> None:
            nonlocal steps
            steps += 1
            self._dirty = True
            fault_points.point(f"{self.stage}.step{index}", iteration)

        rests = iteration < self._resting
        # Without a row there is no shard: the update then is one without a step.
        empty = rests or not self._manifests(manifests)[-1].shards
        with ExitStack() as leases:
            rows = Rows()
            if not empty:
                rows = self._rows(manifests, iteration, link_bytes, leases, kl_factor)
            drawn = chosen(self._ranks.gather_json(candidates(rows.samples, iteration)))
            seen = self._seen(rows, iteration)
            watch = self._config.mismatch_watch
            metrics = {"optimizer_steps": 0.0}
            if not rests:
                metrics = self._learner.update(
                    rows.samples,
                    iteration=iteration,
                    skipped=rows.skipped,
                    before_step=lambda mismatch: watch.check(mismatch, iteration),
                    on_step=on_step,
                    on_progress=self._report,
                    seed=self._seed(iteration),
                    rate_factor=rate_factor,
                )
            read = rows.close()
        if self._learner.parallel.module.routers is not None:
            metrics["routing_bytes"] = read
        if self._mesh.device.type == "cpu":
            # Activations and gradients, which the engine can use until the next update.
            give_back_free_memory()
        fault_points.point(f"{self.stage}.applied", iteration)
        self._version, self._dirty = assigned(iteration).made, False
        self._applied = {
            "policy_version": self._version,
            "digest": self._digest(),
            "metrics": {**metrics, **seen, "seconds": time.perf_counter() - started}
            | self._reader.reads.spent(),
            "shards": [entry.model_dump(mode="json") for entry in rows.shards],
            PREFIXES: drawn,
        }
        return steps

    def _rows(
        self,
        manifests: list[dict[str, Any]],
        iteration: int,
        link_bytes: float,
        leases: ExitStack,
        kl_factor: float,
    ) -> Rows:
        """Open the rows of the update, and score them where it needs that. They are views that must
        go before the leases."""
        skipped = self._skipped(manifests, iteration, link_bytes)
        split = by_minibatch(
            self._config.minibatches(iteration),
            seed=self._seed(iteration),
            iteration=iteration,
            skipped=skipped.table,
        )
        coefficient = self._coefficient(iteration, kl_factor)
        columns = TRAINED if coefficient is None else (*TRAINED, LABEL)
        out = skipped.table[:, 0]
        batch = leases.enter_context(self._open(manifests, columns, split, link_bytes, without=out))
        shards: list[ShardEntry] = []
        old, masks = None, self._masks(batch)
        routers = self._learner.parallel.module.routers
        routing = recorded_routing(batch, None if routers is None else routers.shape)
        if self._config.needs_old_logprobs and not self._config.imitates(iteration):
            plain = training_samples(batch, masks, routing=routing)
            shards, old = self._score(batch, plain, iteration, leases)
        given = old, self._version, coefficient
        samples = training_samples(batch, masks, *given, routing)
        return Rows(samples, skipped, shards, batch, routing)

    @property
    def _resting(self) -> int:
        critic = self._config.critic
        return 0 if critic is None else critic.warmup_iterations

    def _seen(self, rows: Rows, iteration: int) -> dict[str, float]:
        """Measure how far the policy that sampled the rows is from the one that trains on them.
        Raises UpdateRefused where the run file has a small effective sample size stop it."""
        ranks, settings = Ranks(self._mesh, "data_parallel"), self._config.update
        found = age_metrics(rows.batch, self._version, ranks)
        weighing = self._config.algorithm.weighing
        if weighing is not None and not self._config.imitates(iteration):
            weigher = ImportanceCorrection(**weighing)
            found |= importance_metrics(rows.samples, weigher, ranks)
        text = too_small(found, settings.least_sample_size)
        if text and settings.small_sample == "stop":
            raise UpdateRefused(
                f"{text}. The update of iteration {iteration} was stopped before its first step."
            )
        return found

    def _coefficient(self, iteration: int, factor: float) -> Callable[[str], float] | None:
        """The KL coefficient of an environment's episodes; None: all have the run file's, or
        none."""
        as_set = self._config.one_penalty and factor == 1.0
        if as_set or self._config.imitates(iteration):
            return None
        return lambda label: factor * self._config.penalty(label).at(iteration)

    def _skipped(
        self, manifests: list[dict[str, Any]], iteration: int, link_bytes: float
    ) -> Skipped:
        """Choose the samples that nobody reads further; each replica looks at the advantages of a
        part of all rows."""
        if not self._config.skips_zero_advantage or self._config.imitates(iteration):
            return Skipped()
        with self._open(manifests, ADVANTAGES, None, link_bytes) as batch:
            own = advantage_table(batch)
        table = np.concatenate(Ranks(self._mesh, "data_parallel").gather_rows(own))
        whole, seed = self._learner.whole_episodes, self._seed(iteration)
        return choose(table, whole_episodes=whole, seed=seed, iteration=iteration)

    def _score(
        self,
        batch: Batch,
        samples: Sequence[TrainingSample],
        iteration: int,
        leases: ExitStack,
    ) -> tuple[list[ShardEntry], list[np.ndarray]]:
        """The trainer's log-probs of the rank's rows before its first step. A replica's leader
        writes them into a shard and gives views of it; the others keep theirs."""
        if not (self._mesh.leader and len(batch)):
            return [], self._learner.score(samples)
        score = partial(self._learner.score, samples, None)
        entry = self._publish_scores(batch, OLD_LOGPROBS_SCHEMA, self.stage, score)
        written = Manifest(
            run="",
            iteration=iteration,
            stage=self.stage,
            key="",
            policy_version=self._version,
            shards=(entry,),
        )
        scores = leases.enter_context(Batch(self._reader.reads.store, [written]))
        return [entry], scores.list_rows("old_logprobs")

    def _digest(self) -> str:
        """Equal for equal trained weights in an equal mesh; 32 hex digits."""
        parts = {each.name: each.tensor for each in slices_of(self._learner.parallel.published)}
        digest = digest_of(parts)
        if self._mesh.deployment.ranks == 1:
            return digest
        own = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.int64)
        every = [table.tolist() for table in self._ranks.gather(own)]
        return xxhash.xxh3_128_hexdigest(json.dumps(every).encode())

    def _save(self, path: Path, iteration: int, record: dict[str, Any]) -> None:
        self._point(f"{self.stage}.save", iteration)
        self._learner.save(path, {**record, "policy_version": self._version})
        self._restored = path

    def _point(self, name: str, iteration: int) -> None:
        """A fault point whose error is everyone's, as errors inside of what follows it are."""
        self._ranks.do(lambda: fault_points.point(name, iteration))
