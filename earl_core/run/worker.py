"""What the ranks of all of a run's worker groups have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from earl_core.cluster.context import WorkerContext
from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.config import parse_config


class RunWorker:
    """Base of what a rank constructs and the controller calls.

    deployment: a dumped `StageDeployment`. config: a dumped `RunConfig`.
    """

    def __init__(
        self,
        context: WorkerContext,
        deployment: dict[str, Any],
        *,
        config: dict[str, Any],
        run_directory: str,
    ) -> None:
        self._context = context
        self._deployment = StageDeployment(**deployment)
        self._config = parse_config(config)
        self._run_directory = Path(run_directory)
