"""What the ranks of all of a run's worker groups have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earl_core.cluster.context import WorkerContext
from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.config import parse_config
from earl_core.run.reads import Peers, PlanReads
from earl_core.run.shards import run_store
from earl_core.system.processes import host_name


class RunWorker:
    """Base of what a rank constructs and the controller calls.

    deployment: a dumped `StageDeployment`. config: a dumped `RunConfig`. peers: the fields of
    `Peers`.
    """

    def __init__(
        self,
        context: WorkerContext,
        deployment: dict[str, Any],
        *,
        config: dict[str, Any],
        run_directory: str,
        peers: Sequence[Any] = (),
    ) -> None:
        self._context = context
        self._deployment = StageDeployment(**deployment)
        self._config = parse_config(config)
        self._run_directory = Path(run_directory)
        self._peers = Peers(*peers)

    @property
    def _hosts(self) -> tuple[str, ...]:
        """The host of each rank, as manifests name it."""
        return self._context.hosts or (host_name(),) * self._context.world_size

    def _reads(self) -> PlanReads:
        """For the shards of this run, on whatever host they lie."""
        store = run_store(self._run_directory, self._config)
        return PlanReads(store, self._config.dispatch.verify == "always", self._peers)
