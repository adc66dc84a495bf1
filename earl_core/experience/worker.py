"""The rank of the `experience` worker group: rewards and advantages, from manifests alone."""

from __future__ import annotations

import time
from typing import Any

from earl_core.cluster.context import WorkerContext
from earl_core.config import parse_config
from earl_core.dispatch import Batch
from earl_core.dispatch.manifest import ShardEntry, parse_manifest
from earl_core.environments.registry import check
from earl_core.experience.advantage import advantage_columns
from earl_core.experience.reward import reward_columns
from earl_core.run.shards import run_store
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, REWARD_SCHEMA


class ExperienceWorker:
    """Reads shards named by manifests, writes new columns for the same rows."""

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

    def check(self) -> dict[str, Any]:
        """Raise `EnvironmentConfigError` unless the environments can be made."""
        environment = self._config.environment
        check(environment.name, environment.options)
        if self._config.evaluation.options:
            check(environment.name, {**environment.options, **self._config.evaluation.options})
        return {}

    def reward(self, manifests: list[dict[str, Any]]) -> dict[str, Any]:
        """Rewards of the episodes in the rollout manifest."""
        started = time.perf_counter()
        with self._open(manifests) as batch:
            columns, metrics = reward_columns(batch)
        entry = self._store.write(
            stage="reward",
            iteration=self._context.iteration or 0,
            rank=self._context.rank,
            schema=REWARD_SCHEMA,
            columns=columns,
        )
        return _result(entry, metrics, started)

    def advantage(self, manifests: list[dict[str, Any]]) -> dict[str, Any]:
        """Advantages from the rollout's, the reward's and, if given, the reference's manifest."""
        started = time.perf_counter()
        with self._open(manifests) as batch:
            columns, metrics = advantage_columns(batch, self._config.algorithm)
        entry = self._store.write(
            stage="advantage",
            iteration=self._context.iteration or 0,
            rank=self._context.rank,
            schema=ADVANTAGE_SCHEMA,
            columns=columns,
        )
        return _result(entry, metrics, started)

    def _open(self, manifests: list[dict[str, Any]]) -> Batch:
        parsed = [parse_manifest(manifest) for manifest in manifests]
        return Batch(self._store, parsed, verify=self._verify)


def _result(entry: ShardEntry, metrics: dict[str, float], started: float) -> dict[str, Any]:
    seconds = time.perf_counter() - started
    return {"shards": [entry.model_dump(mode="json")], "metrics": {**metrics, "seconds": seconds}}
