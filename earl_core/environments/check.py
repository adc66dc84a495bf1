"""A run's environments are made once, before anything else of the run starts."""

from __future__ import annotations

from typing import Any

from earl_core.config import RunConfig
from earl_core.environments.pool import EnvironmentPool
from earl_core.run.worker import RunWorker
from earl_core.system import fault_points


async def check_environments(config: RunConfig) -> None:
    """Start and end a host of the training's environment, and one of the evaluation's if that
    differs: the user's code runs there and nowhere else. Raises `ConfigError`."""
    environment = config.environment
    options = [environment.options]
    if config.evaluation.options:
        options.append({**environment.options, **config.evaluation.options})
    for each in options:
        pool = EnvironmentPool.of(environment, each, hosts=1, concurrency=1, log_path=None)
        await pool.start()
        await pool.stop()


class Check(RunWorker):
    """The rank that does it, so that the controller need not."""

    async def check(self) -> dict[str, Any]:
        """Raise `ConfigError` unless the environments can be made."""
        fault_points.point("experience.check", 0)
        await check_environments(self._config)
        return {}
