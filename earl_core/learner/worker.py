"""The rank of the `update` worker group: holds the training state and applies each update once.

The state has a policy version, the number of updates in it. From the first optimizer step of an
update to its seal the state is dirty: it is neither the old version nor the new one on disk. A
dirty state reloads what was last restored or saved before anything else; one that applied an
update but could not save it only saves.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from earl_core import faults
from earl_core.cluster.context import WorkerContext
from earl_core.config import RunConfig, parse_config
from earl_core.dispatch import Batch, Manifest, ShardEntry
from earl_core.dispatch.manifest import parse_manifest
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.samples import training_samples, write_scores
from earl_core.run.shards import run_store
from earl_core.selector.deployment import StageDeployment
from earl_core.trajectory.schema import OLD_LOGPROBS_SCHEMA
from earl_core.weights.manifest import config_digest
from earl_core.weights.publish import digest_of, publish

logger = logging.getLogger(__name__)


class WrongVersion(RuntimeError):
    """The state held is not the one that the call starts from."""


class LearnerWorker:
    """Call `restore` first; then `update`, `publish` and `restore` in any order."""

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
        self._verify = self._config.dispatch.verify == "always"
        self._deployment = StageDeployment.model_validate(deployment)
        self._learner = build_learner(self._config, self._deployment)
        self._config_digest = config_digest(Path(self._config.model.path))
        self._version = 0
        self._dirty = False
        self._restored: Path | None = None
        self._applied: dict[str, Any] | None = None

    def restore(self, checkpoint: str | None) -> dict[str, Any]:
        """Take the state of a checkpoint; None: the initial model, which is loaded already."""
        path = Path(checkpoint) if checkpoint else None
        if path is not None:
            state = self._learner.restore(path)
            self._version = int(state["policy_version"])
        elif self._version or self._dirty:
            self._learner = build_learner(self._config, self._deployment)
            self._version = 0
        self._restored, self._dirty, self._applied = path, False, None
        return {"policy_version": self._version}

    def update(
        self,
        manifests: list[dict[str, Any]],
        checkpoint: str | None,
        record: dict[str, Any],
    ) -> dict[str, Any]:
        """Apply iteration k's update to version k, once; write `checkpoint` if given.

        manifests: the rollout's, the reference's if there is one, the advantage's last. Returns
        the new policy version, the weights' digest, metrics, and how many steps were applied in
        this call (0 when an earlier call had applied them).
        """
        iteration = self._context.iteration or 0
        steps = 0
        if self._dirty:
            logger.warning("the last update was cut off: going back to the last saved state")
            self.restore(str(self._restored) if self._restored else None)
        if self._applied is None or self._version != iteration + 1:
            if self._version != iteration:
                raise WrongVersion(
                    f"iteration {iteration} updates policy version {iteration}, but the learner "
                    f"holds version {self._version}: resume the run from its last checkpoint"
                )
            steps = self._apply(manifests, iteration)
        assert self._applied is not None
        if checkpoint is not None:
            self._save(Path(checkpoint), iteration, record)
        return {**self._applied, "steps_applied": steps}

    def publish(self, directory: str, policy_version: int, dtype: str) -> dict[str, Any]:
        """Write the weights into shared memory; returns the dumped `WeightsManifest`."""
        if self._dirty or policy_version != self._version:
            raise WrongVersion(
                f"policy version {policy_version} was asked for, but the learner holds version "
                f"{self._version}{' in the middle of an update' if self._dirty else ''}"
            )
        manifest = publish(
            self._learner.named_weights(),
            Path(directory),
            policy_version,
            dtype,
            config_digest=self._config_digest,
        )
        return manifest.model_dump(mode="json")

    def _apply(self, manifests: list[dict[str, Any]], iteration: int) -> int:
        started = time.perf_counter()
        steps = 0

        def on_step(index: int) -> None:
            nonlocal steps
            steps += 1
            self._dirty = True
            faults.point(f"update.step{index}", iteration)

        parsed = [parse_manifest(manifest) for manifest in manifests]
        shards: tuple[ShardEntry, ...] = ()
        if self._config.needs_old_logprobs:
            parsed.append(self._score(parsed, iteration))
            shards = parsed[-1].shards
        with Batch(self._store, parsed, verify=self._verify) as batch:
            samples = training_samples(batch)
            metrics = self._learner.update(
                samples, iteration=iteration, on_step=on_step, on_progress=self._report
            )
            # Views must be gone before the batch gives its leases back.
            del samples
        faults.point("update.applied", iteration)
        self._version, self._dirty = iteration + 1, False
        self._applied = {
            "policy_version": self._version,
            "digest": digest_of(self._learner.named_weights()),
            "metrics": {**metrics, "steps": steps, "seconds": time.perf_counter() - started},
            "shards": [entry.model_dump(mode="json") for entry in shards],
        }
        return steps

    def _score(self, manifests: list[Manifest], iteration: int) -> Manifest:
        """Write the trainer's log-probs before its first step; read back like any column."""
        with Batch(self._store, manifests, verify=self._verify) as batch:
            entry = write_scores(
                self._store,
                batch,
                lambda samples, out: self._learner.score(samples, out=out),
                stage="update",
                iteration=iteration,
                rank=self._context.rank,
                schema=OLD_LOGPROBS_SCHEMA,
            )
        return Manifest(
            run=manifests[-1].run,
            iteration=iteration,
            stage="update",
            key="",
            policy_version=iteration,
            shards=(entry,),
        )

    def _save(self, path: Path, iteration: int, record: dict[str, Any]) -> None:
        faults.point("update.save", iteration)
        prompts = (iteration + 1) * self._config.rollout.prompts_per_iteration
        state = {**record, "policy_version": self._version, "prompts_trained": prompts}
        self._learner.save(path, state)
        self._restored = path

    def _report(self, done: int, samples: int) -> None:
        self._context.report({"samples_done": done, "samples": samples})


def build_learner(config: RunConfig, deployment: StageDeployment) -> PolicyLearner:
    """A learner laid out as the deployment says."""
    transformers_logging.disable_progress_bar()
    update = config.update.model_copy(
        update={
            "threads": deployment.threads,
            "activation_checkpointing": deployment.activation_checkpointing,
            "max_tokens_per_microbatch": deployment.max_tokens_per_microbatch
            or config.update.max_tokens_per_microbatch,
        }
    )
    return PolicyLearner(
        config.model,
        update,
        config.algorithm,
        temperature=config.rollout.temperature,
        iterations=config.iterations,
        seed=config.seed,
    )
