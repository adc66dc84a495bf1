"""Host processes of environments: what shows at their start, their log, and their end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.host_process import HostProcess
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.system.errors import ConfigError
from tests.environments.test_pool import COUNTING, USER, alive, running, until


async def test_mistakes_show_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, options, match in (
        (f"{USER}:Refusing", {}, "no sandbox here"),
        ("tic_tac_toe", {"oponent": 1}, "unknown option 'oponent'"),
        ("nowhere", {}, "no environment 'nowhere'"),
    ):
        pool = EnvironmentPool(name, options, hosts=2, log_path=tmp_path / "hosts.log")
        with pytest.raises(ConfigError, match=match):
            await pool.start()
    # A host counts from when it is up, which takes a while on a busy machine: it hears of less.
    send, less = HostProcess.send, {"start_timeout_seconds": 1}
    monkeypatch.setattr(HostProcess, "send", lambda host, told: send(host, {**told, **less}))
    late = EnvironmentPool(f"{USER}:NeverReady", start_timeout_seconds=5)
    told = r"was not ready after 5 s \(environment.start_tim[\s\S]*user_environments.py"
    with pytest.raises(ConfigError, match=told):
        await late.start()
    with pytest.raises(RuntimeError, match="await start"):
        await EnvironmentPool("tic_tac_toe").reset(0, 0, 0)


async def test_the_log_holds_what_hosts_say(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "hosts.log"
    async with running(COUNTING, step_timeout_seconds=1.5, log_path=log) as pool:
        await pool.reset(1, 1, 7)
        with pytest.raises(EnvironmentFailed) as raised:
            await pool.step(1, "hold")
    assert "_obey" in raised.value.detail
    assert "user_environments.py" in raised.value.detail
    assert "Timeout (" in log.read_text()


async def test_episodes_failed_by_timeout_show_where() -> None:
    async with running(COUNTING, step_timeout_seconds=1.5) as pool:
        await pool.reset(1, 1, 7)
        with pytest.raises(EnvironmentFailed, match=r"over 1\.5 s, at:[\s\S]*time\.sleep"):
            await pool.step(1, "sleep 100")


@pytest.mark.parametrize("text", ["x", "hold"])
@pytest.mark.parametrize("run", ["main()", "asyncio.to_thread(asyncio.run, main())"])
def test_hosts_die_with_a_killed_parent(text: str, run: str) -> None:
    """SIGKILL of the process that holds the pool, with a free and with a hung host; with the pool
    in its main thread and in another."""
    code = f"""
import asyncio
from earl_core.environments.hosting.pool import EnvironmentPool
async def main():
    pool = EnvironmentPool({COUNTING!r}, hosts=2, step_timeout_seconds=2.0)
    await pool.start()
    await pool.reset(1, 1, 7)
    step = asyncio.create_task(pool.step(1, {text!r}))
    await asyncio.sleep(0.3)
    print(*pool.host_pids, flush=True)
    await asyncio.sleep(1000)
asyncio.run({run})
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not any(alive(pid) for pid in pids))
