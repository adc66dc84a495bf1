"""Calls of many environments at once: what overlaps, what is bounded, what waits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.pool import EnvironmentPool
from tests.environments.test_pool import BOTH, COUNTING, USER, WAITING, expected, running


async def naps(pool: EnvironmentPool, episodes: int) -> tuple[float, int]:
    """Seconds that so many steps took together, and how many slept at the same time."""
    began = time.monotonic()
    steps = await asyncio.gather(*(pool.step(episode, "nap 0.2") for episode in range(episodes)))
    seconds = time.monotonic() - began
    spans = [(step.info["began"], step.info["ended"]) for step in steps]
    return seconds, max(sum(a <= moment < b for a, b in spans) for moment, _ in spans)


@BOTH
async def test_waiting_overlaps(name: str) -> None:
    async with running(name) as pool:
        await asyncio.gather(*(pool.reset(episode, episode, 7) for episode in range(32)))
        together, tries = 0, 0
        # The first begin the threads, and a machine that pauses parts others.
        while together <= 16 and tries < 20:
            together = max(together, (await naps(pool, 32))[1])
            tries += 1
        assert together > 16


async def test_threads_are_bounded_and_waiting_for_one_is_not_over_the_deadline() -> None:
    async with running(COUNTING, hosts=2, concurrency=3, step_timeout_seconds=2.0) as pool:
        await asyncio.gather(*(pool.reset(episode, episode, 7) for episode in range(48)))
        seconds, together = await naps(pool, 48)
        assert seconds > 2.2
        assert together <= 4
        assert pool.host_restarts == 0


async def test_slow_calls_run_side_by_side(tmp_path: Path) -> None:
    async with running(COUNTING, {"directory": str(tmp_path)}) as pool:
        await asyncio.gather(*(pool.reset(i, i, 7) for i in range(40)))
        text, begun = f"until {tmp_path / 'end'}", tmp_path / "until"
        steps = [asyncio.create_task(pool.step(i, text)) for i in range(30)]
        while not begun.exists() or len(begun.read_text()) < 30:
            await asyncio.sleep(0.01)
        fast = await asyncio.gather(*(pool.step(i, "x") for i in range(30, 40)))
        assert len(fast) == 10
        assert not any(step.done() for step in steps)
        (tmp_path / "end").touch()
        await asyncio.gather(*steps)


async def test_a_closed_episodes_coroutine_is_cancelled(tmp_path: Path) -> None:
    options = {"directory": str(tmp_path)}
    async with running(WAITING, options, step_timeout_seconds=2.0) as pool:
        await pool.reset(1, 1, 7)
        step = asyncio.create_task(pool.step(1, "wait 1000"))
        await asyncio.sleep(0.05)
        await pool.close(1)
        await asyncio.sleep(2.5)  # over its deadline, had it gone on
        assert step.cancelled()
        await pool.reset(1, 1, 7)
        with pytest.raises(EnvironmentFailed, match=r"exception[\s\S]*CancelledError"):
            await pool.step(1, "cancel")
        assert pool.host_restarts == 0
    # Those of the check at the start, the cancelled one and the one that failed.
    assert (tmp_path / "close").read_text() == "xxx"


async def test_environments_that_must_not_run_side_by_side() -> None:
    async with running(f"{USER}:Serial", step_timeout_seconds=2.0) as pool:
        await asyncio.gather(*(pool.reset(i, i, 7) for i in range(40)))
        await asyncio.gather(*(pool.step(i, "sleep 0.02") for i in range(40)))
        others = asyncio.gather(*(pool.step(i, "x") for i in range(1, 40)))
        with pytest.raises(EnvironmentFailed, match="timeout"):
            await pool.step(0, "sleep 1000")
        assert all(step.messages[0]["content"].startswith("2 ") for step in await others)


async def test_many_environments_step_together() -> None:
    async with running("tic_tac_toe", {"illegal_action": "retry", "max_retries": 100}) as pool:
        await asyncio.gather(*(pool.reset(i, i, 1) for i in range(256)))
        for _ in range(5):
            steps = await asyncio.gather(*(pool.step(i, "?") for i in range(256)))
            assert not any(step.done for step in steps)


async def test_closing_and_cancelling(tmp_path: Path) -> None:
    options = {"directory": str(tmp_path)}
    async with running(COUNTING, options) as pool:
        await pool.reset(1, 1, 7)
        await pool.reset(2, 2, 7)
        step = asyncio.create_task(pool.step(1, f"until {tmp_path / 'end'}"))
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="call under way"):
            await pool.step(1, "x")
        await pool.close(1)
        with pytest.raises(asyncio.CancelledError):
            await step
        (tmp_path / "end").touch()
        await pool.close(1)  # once more does nothing
        with pytest.raises(ValueError, match="not open"):
            await pool.step(1, "x")
        await pool.reset(1, 1, 7)  # its number may be used again
        with pytest.raises(ValueError, match="is open"):
            await pool.reset(1, 1, 7)
        assert await pool.step(1, "x") == expected(1, 7, ["x"])[-1]
    # Closed: the one made by the check at the start, the cancelled one, and two by the stop.
    assert (tmp_path / "reset").read_text() == "xxx"
    assert (tmp_path / "close").read_text() == "xxxx"
