"""OpenEnv's environments, unchanged, in an interpreter of their own: EARL's packages are not
there.

In one file, so that one installation serves all.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.pool import EnvironmentPool
from tests.flows.runs import LEARNING, REPOSITORY, Runs
from tests.foreign import foreign_python
from tests.shared import free_port

pytestmark = pytest.mark.slow

WORLDS = "tests.environments.openenv_worlds"
GUESS = {"environment": f"{WORLDS}:Guess", "action": f"{WORLDS}:GuessAction"}
ADDER = {
    "environment": f"{WORLDS}:Adder",
    "action": "openenv.core.env_server.mcp_types:CallToolAction",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its packages want other versions of mcp and pillow than ours."""
    return foreign_python(tmp_path_factory.mktemp("openenv"), "openenv==0.10.0")


@pytest.fixture(autouse=True)
def imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports takes ten seconds to compile."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")


@pytest.fixture
def server(python: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of `Guess`, which allows one session, by OpenEnv's own program; and its URL."""
    port = free_port()
    command = (python, "-m", "uvicorn", f"{WORLDS}:app", "--port", str(port))
    process = subprocess.Popen(command, cwd=REPOSITORY)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
            break
        except OSError:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.2)
    yield url, process
    process.kill()
    process.wait()


def played(
    scenario: Callable[[EnvironmentPool], Awaitable[None]], options: Any, **settings: Any
) -> None:
    async def run() -> None:
        pool = EnvironmentPool("openenv", options, **settings)
        await pool.start()
        try:
            await scenario(pool)
        finally:
            await pool.stop()

    asyncio.run(run())


async def guess(pool: EnvironmentPool, episode: int) -> list[float]:
    """Both guesses, and what was said of them; the rewards."""
    first = await pool.step(episode, 'I guess\n```json\n{"cell": 4}\n```')
    (message,) = first.messages
    assert json.loads(message["content"])["last"] == 4
    last = await pool.step(episode, "5")
    assert (first.done, last.done, last.info["outcome"]) == (False, True, "done")
    return [first.reward, last.reward]


def cell(seed_of_prompt: list[float]) -> int:
    """The cell that explains the rewards of guessing 4, then 5."""
    found = [
        cell
        for cell in range(1, 10)
        if seed_of_prompt == [1 - abs(guessed - cell) / 8 for guessed in (4, 5)]
    ]
    return found[0]


def test_a_class_is_played_as_it_is(python: str) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        assert pool.versions["mcp"].startswith("1.")
        (first,) = await pool.reset(0, prompt=0, seed=0)
        assert first["content"].startswith("123|456|789\n\nAnswer with one JSON object")
        schema = json.loads(first["content"].partition("alone:\n")[2])
        assert list(schema["properties"]) == ["cell"]
        for said, complaint in {
            "no idea": "cell: Input should be a valid integer",
            '{"cell": 12}': "cell: Input should be less than or equal to 9",
        }.items():
            result = await pool.step(0, said)
            assert complaint in result.messages[0]["content"]
            assert (result.reward, result.done) == (0.0, False)
        rewards = await guess(pool, 0)
        await pool.reset(1, prompt=0, seed=1)
        assert await guess(pool, 1) == rewards
        found = set()
        for prompt in range(1, 9):
            await pool.reset(10 + prompt, prompt, 0)
            found.add(cell(await guess(pool, 10 + prompt)))
        assert len(found) > 2
        await pool.reset(2, prompt=0, seed=1)
        for _ in range(3):
            result = await pool.step(2, "[]")
        assert (result.reward, result.done) == (-1.0, True)
        assert result.info == {
            "outcome": "illegal",
            "outcomes": ["done", "illegal"],
            "metrics": {"invalid_actions": 3.0},
        }

    played(scenario, GUESS, python=python)


def test_an_environment_of_tools_tells_them(python: str) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        (first,) = await pool.reset(0, 0, 0)
        (tool,) = json.loads(first["content"].splitlines()[-1])
        assert (tool["name"], tool["description"]) == ("add", "Add two numbers.")
        answer = await pool.step(0, '{"tool_name": "add", "arguments": {"a": 2, "b": 3}}')
        assert json.loads(answer.messages[0]["content"])["result"]["data"] == 5
        answer = await pool.step(0, "add 2 and 3")
        assert "it has no JSON object" in answer.messages[0]["content"]

    played(scenario, ADDER, python=python)


def test_a_server_is_played_by_our_own_python(
    server: tuple[str, subprocess.Popen[bytes]],
) -> None:
    url, process = server

    async def scenario(pool: EnvironmentPool) -> None:
        assert pool.versions == {}
        (first,) = await pool.reset(0, prompt=0, seed=0)
        assert '"cell"' in first["content"]
        complaint = await pool.step(0, '{"cell": 12}')
        assert "cell: Input should be less than or equal to 9" in complaint.messages[0]["content"]
        waits = asyncio.create_task(pool.reset(1, prompt=0, seed=0))
        rewards = await guess(pool, 0)
        assert not waits.done()
        await pool.close(0)
        await waits
        assert await guess(pool, 1) == rewards
        await pool.close(1)
        await pool.reset(2, prompt=1, seed=0)
        process.kill()
        for step in (lambda: pool.step(2, "5"), lambda: pool.reset(3, 1, 0)):
            with pytest.raises(EnvironmentFailed, match="the OpenEnv server http") as raised:
                await step()
            assert raised.value.by_infrastructure

    played(scenario, {"url": url})


def test_it_trains(python: str, runs: Runs) -> None:
    runs.train(
        *LEARNING,
        "iterations=3",
        "environment.name=openenv",
        f"environment.options={json.dumps({**GUESS, 'instructions': ''})}",
        f"environment.python={python}",
    )
    runs.assert_learnt()
    for line in runs.metrics():
        assert line["rollout/episodes_failed"] == 0.0
        assert line["rollout/turns/mean"] > 1
    record = json.loads((runs.run() / "environments.json").read_text())["openenv"]
    assert record["interpreter"] == python
    assert record["openenv"] == "0.10.0"
