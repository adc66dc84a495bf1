"""Environments and reward functions are made once, before anything else of the run starts."""

from __future__ import annotations

from typing import Any

from earl_core.config import RunConfig
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.run.worker import RunWorker
from earl_core.system import fault_points


async def check_environments(config: RunConfig) -> list[str]:
    """Start and end a host of each environment, one of the evaluation's if its options differ, and
    one of the reward functions: the user's code runs there and nowhere else. Returns
    what is to be said of their tools. Raises `ConfigError`."""
    evaluated = config.evaluated if config.evaluation.options else {}
    suites = config.evaluation.suites
    pools = [
        EnvironmentPool.of(environment, hosts=1, concurrency=1, log_path=None)
        for environment in (*config.played.values(), *evaluated.values(), *suites)
    ]
    if config.reward.functions:
        pools.append(EnvironmentPool.of_rewards(config.reward, hosts=1, log_path=None))
    notes: dict[str, None] = {}
    for pool in pools:
        await pool.start()
        notes |= dict.fromkeys(pool.notes)
        await pool.stop()
    return list(notes)


class Check(RunWorker):
    """The rank that does it, so that the controller need not."""

    async def check(self) -> dict[str, Any]:
        """Raise `ConfigError` unless the environments and reward functions can be made; `notes`
        is what is to be said of their tools."""
        fault_points.point("experience.check", 0)
        return {"notes": await check_environments(self._config)}
