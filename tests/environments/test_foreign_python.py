"""Environments under another interpreter, whose packages are not ours."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from earl_core.config import parse_config
from earl_core.config.reward import RewardConfig
from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.check import check_environments
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.system.errors import ConfigError
from tests.environments.test_tools import call, calling, in_pool, texts

WORLD = """
import importlib.util, os, sys
import pydantic
from earl_core.environments.base import StepResult

class World:
    def __init__(self, greeting="hello"):
        self.greeting, self.turns = greeting, 0

    def reset(self, prompt, seed):
        return [{"role": "user", "content": self.greeting}]

    def step(self, text):
        self.turns += 1
        ours = [name for name in ("torch", "transformers") if importlib.util.find_spec(name)]
        info = {"pydantic": pydantic.VERSION, "path": sys.path, "ours": ours, "pid": os.getpid()}
        done = self.turns == 3
        return StepResult([{"role": "user", "content": "on"}], 1.0, done, info if done else {})

    def close(self):
        pass

async def agent(task, base_url, api_key):
    return {"reward": 1.0, "metrics": {"pydantic": float(pydantic.VERSION)}}

def score(episode):
    return episode["turns"] + float(pydantic.VERSION)
"""
ASKED = {"model": "m", "prompt": "How good?"}

OPENENV = {"name": "openenv", "python": None}
HOSTED = {"environment": "tests.worlds:World", "action": "tests.worlds:Action"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with a pydantic that EARL cannot use."""
    home = tmp_path_factory.mktemp("foreign")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "pydantic").mkdir()
    (packages / "pydantic" / "__init__.py").write_text("VERSION = '1.10'\n")
    (packages / "pydantic-1.10.dist-info").mkdir()
    (packages / "pydantic-1.10.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pydantic\nVersion: 1.10\n"
    )
    return str(home / "bin" / "python")


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign_world.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)


def test_only_the_host_program_is_ours(python: str, tmp_path: Path) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        assert pool.versions == {"python": sys.version.split()[0], "pydantic": "1.10"}
        first = await pool.reset(0, 0, 0)
        assert first[0]["content"] == "hi"
        for _ in range(2):
            await pool.step(0, "x")
        (before,) = pool.host_pids
        os.kill(before, signal.SIGKILL)
        info = (await pool.step(0, "x")).info
        assert info["pid"] != before
        assert (info["pydantic"], info["ours"]) == ("1.10", [])
        archive = tmp_path / "logs" / "environment_host.pyz"
        assert info["path"][0] == str(archive)
        assert info["path"][-1] == str(tmp_path)
        ours = [part for part in sys.path if "site-packages" in part]
        assert not set(ours) & set(info["path"])

    log = tmp_path / "logs" / "hosts.log"
    options = {"options": {"greeting": "hi"}, "python": python, "log_path": log}
    in_pool(scenario, "foreign_world:World", tools=(), **options)


def test_an_agent_runs_there_too(python: str) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        await pool.reset(0, 0, 0, {"base_url": "x", "api_key": "y"})
        result = await pool.step(0, "")
        assert result.info == {"metrics": {"pydantic": 1.1}}

    in_pool(scenario, "agent:foreign_world:agent", tools=(), python=python)


async def test_reward_functions_run_there_too(python: str) -> None:
    reward = RewardConfig.model_validate(
        {
            "functions": [
                {"function": "judge", "options": {"base_url": "http://127.0.0.1:1", **ASKED}},
                {"function": "foreign_world:score"},
            ],
            "python": python,
        }
    )
    pool = EnvironmentPool.of_rewards(reward, log_path=None)
    await pool.start()
    try:
        await pool.reset(0, 1, 0)
        assert (await pool.step(0, '{"turns": 2}')).reward == 3.1
        await pool.reset(1, 0, 0)
        with pytest.raises(EnvironmentFailed, match="Connection refused"):
            await pool.step(1, '{"messages": []}')
    finally:
        await pool.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "no/such/python"}, "is no program"),
        ({"python": "."}, "is no program"),
        ({"name": "no_such_module:World"}, "cannot be imported: ModuleNotFoundError"),
        (
            {"name": "textarena", "options": {"game": "Nim-v0"}},
            "bin/python has no package textarena",
        ),
        ({"name": "openenv", "options": HOSTED}, "bin/python has no package openenv"),
        ({"name": None, "agent": "verifiers", "options": {"env": {}}}, "has no package verifiers"),
        ({**OPENENV, "options": {"url": "http://127.0.0.1:9"}}, "does not tell the schema of its"),
        ({**OPENENV, "options": {**HOSTED, "url": "http://x"}}, "give either url, or environment"),
        ({**OPENENV, "options": {**HOSTED, "token": "env:HOME"}}, "a token is for a url"),
        ({"tools": ["calculator"]}, "tools need the packages transformers and jsonschema"),
        ({"python": "/bin/false"}, "the host process died as it started"),
    ],
)
def test_what_cannot_start_is_refused_before_work_starts(
    python: str, options: dict[str, object], message: str
) -> None:
    environment = {"name": "foreign_world:World", "python": python} | options
    config = parse_config(
        {
            "name": "x",
            "iterations": 1,
            "model": {"path": "m"},
            "environment": environment,
            "rollout": {"prompts_per_iteration": 1, "group_size": 2, "max_turns": 1},
            "update": {},
        }
    )
    with pytest.raises(ConfigError) as raised:
        asyncio.run(check_environments(config))
    assert message in str(raised.value)


def test_tools_work_where_their_packages_are(tmp_path: Path) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        assert pool.versions["python"] == sys.version.split()[0]
        await pool.reset(0, 0, 0)
        result = await pool.use_tools(0, calling(call("calculator", expression="2 + 2")))
        assert texts(result) == ["4"]

    in_pool(scenario, "foreign_world:World", tools=("calculator",), python=sys.executable)
