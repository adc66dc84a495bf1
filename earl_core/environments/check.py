"""The rank in which a run's environments are made once, before anything else of the run starts."""

from __future__ import annotations

from typing import Any

from earl_core.environments.registry import check
from earl_core.run.worker import RunWorker
from earl_core.system import fault_points


class Check(RunWorker):
    """Runs the user's code so that the controller need not."""

    def check(self) -> dict[str, Any]:
        """Raise `ConfigError` unless the environments can be made."""
        fault_points.point("experience.check", 0)
        environment = self._config.environment
        servers = [server.model_dump() for server in environment.mcp]
        check(environment.played, environment.options, environment.tools, servers)
        if self._config.evaluation.options:
            check(environment.played, {**environment.options, **self._config.evaluation.options})
        return {}
