"""Environments and reward functions are made once, before anything else of the run starts."""

from __future__ import annotations

from typing import Any, NamedTuple

from earl_core.config import ConfigError, RunConfig
from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.run.worker import RunWorker
from earl_core.system import fault_points


class Found(NamedTuple):
    """What environments say of themselves. notes: what is to be said of their tools.
    prompt_counts: how many prompts there are, by label, where the environment knows it. returns,
    scores: declared ranges of what environments return, and functions score, by label."""

    notes: list[str]
    prompt_counts: dict[str, int]
    returns: dict[str, list[float]]
    scores: dict[str, list[float]]


async def check_environments(config: RunConfig) -> Found:
    """Start and end a host of each environment, one of the evaluation's if its options differ, and
    one of the reward functions: the user's code runs there and nowhere else. The reward function
    of a data set scores one answer. Raises `ConfigError`."""
    evaluated = config.evaluated if config.evaluation.options else {}
    suites = config.evaluation.suites
    environments = [*config.played.values(), *evaluated.values(), *suites]
    pools = [
        EnvironmentPool.of(environment, hosts=1, concurrency=1, log_path=None)
        for environment in environments
    ]
    prompts = [
        pool
        for pool, environment in zip(pools, environments, strict=True)
        if environment.name == "prompt"
    ]
    if config.reward.functions:
        pools.append(EnvironmentPool.of_rewards(config.reward, hosts=1, log_path=None))
    notes: dict[str, None] = {}
    counts: dict[str, int] = {}
    returns: dict[str, list[float]] = {}
    scores: dict[str, list[float]] = {}
    # They stand first.
    labels = dict(zip(pools, config.played, strict=False))
    both = [pool for pool, each in zip(pools, environments, strict=False) if each.train == "all"]
    for pool in pools:
        await pool.start()
        notes |= dict.fromkeys(pool.notes)
        try:
            if pool in both and not pool.wants_policy:
                raise ConfigError(
                    "environment.train is `all`, but the environment does not ask the policy",
                    remedy="leave it out, or choose the policy as the opponent (of a board game: "
                    "options.opponent `policy`)",
                )
            if pool in prompts:
                await _try_reward(pool)
            if (label := labels.get(pool)) in config.row_curricula:
                _require_prompts(pool, label)
            if label is not None and pool.prompt_count > 0:
                counts[label] = pool.prompt_count
            if pool in labels and (declared := pool.ranges.get("")):
                returns[labels[pool]] = declared
            elif pool not in labels:
                scores |= {title: each for title, each in pool.ranges.items() if title}
        finally:
            await pool.stop()
    return Found(list(notes), counts, returns, scores)


def _require_prompts(pool: EnvironmentPool, label: str) -> None:
    if pool.prompt_count < 1:
        named = f" of {label}" if label else ""
        raise ConfigError(
            f"the curriculum{named} chooses among rows, and the environment does not say that it "
            "has any: its prompts are numbers without end",
            remedy="leave environment.curriculum out, or, in an environment of your own, set "
            "prompt_count to the number of its prompts",
        )


_TRIED = "0"
"""An answer that most parsers take."""


async def _try_reward(pool: EnvironmentPool) -> None:
    """Have a data set's reward function score an answer to its first row. Raises `ConfigError`."""
    try:
        await pool.reset(0, 0, 0)
        await pool.step(0, _TRIED)
    except EnvironmentFailed as failure:
        if failure.by_infrastructure or failure.reason == "host_died":
            # A run retries these, too.
            return
        said = failure.detail.strip().splitlines() or [failure.reason]
        raise ConfigError(
            f"the reward function fails for the answer {_TRIED!r} to row 0 of its data set "
            f"({failure.reason}: {said[-1]})",
            remedy="have environment.options.reward_function return a number for any answer, take "
            "the columns that rows have, and answer within step_timeout_seconds",
        ) from failure


class Check(RunWorker):
    """The rank that does it, so that the controller need not."""

    async def check(self) -> dict[str, Any]:
        """Raise `ConfigError` unless the environments and reward functions can be made; the fields
        of `Found`."""
        fault_points.point("experience.check", 0)
        return (await check_environments(self._config))._asdict()
