"""Calls that grow no older for a while, because what they wait for is away."""

from __future__ import annotations

import asyncio

import pytest

from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.pool import EnvironmentPool

UNRELIABLE = "tests.rollout.environments:Unreliable"
HELD, OTHER = 0, 1


def test_a_held_call_outlives_its_deadline_and_its_host() -> None:
    """Another one, which is late, costs the process; the next one holds the call, too."""

    async def work() -> None:
        pool = EnvironmentPool(
            UNRELIABLE,
            {"raising": [], "hanging": [HELD, OTHER]},
            step_timeout_seconds=1.2,
        )
        await pool.start()
        try:
            for episode in (HELD, OTHER):
                await pool.reset(episode, episode, 0)
            pool.hold([HELD])
            held = asyncio.create_task(pool.step(HELD, "a"))
            with pytest.raises(EnvironmentFailed, match="step took over"):
                await pool.step(OTHER, "a")
            while not pool.host_restarts:
                await asyncio.sleep(0.05)
            done, _ = await asyncio.wait({held}, timeout=3.5)
            assert not done
            pool.hold(())
            with pytest.raises(EnvironmentFailed, match="step took over"):
                await held
        finally:
            await pool.stop()

    asyncio.run(work())
