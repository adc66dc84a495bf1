"""Tools of servers that speak the Model Context Protocol: real ones, over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from earl_core.config.environment import McpConfig
from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.system.errors import ConfigError
from tests.environments.test_tools import SHOP, call, calling, check, in_pool, texts

pytest.importorskip("mcp")  # comes with vLLM

ENDLESS = str(Path(__file__).with_name("mcp_endless.py"))
CLOSED = str(Path(__file__).with_name("closed_server.py"))
SCRIPT = str(Path(__file__).with_name("mcp_server.py"))


def server(**settings: Any) -> list[dict[str, Any]]:
    return [McpConfig(**settings).model_dump()]


OVER_PIPES = server(command=(sys.executable, SCRIPT), variables={"GIVEN": "env:EARL_TEST_GIVEN"})


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EARL_TEST_GIVEN", "a secret")


@contextmanager
def listening(*arguments: str) -> Iterator[str]:
    """The URL of a script's port, which is its last argument but those given."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, arguments[0], str(port), *arguments[1:]]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_a_server_over_pipes_one_that_dies_and_a_host_that_dies() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        names = [schema["function"]["name"] for schema in pool.tools]
        assert names == ["double", "fail", "wait", "variable", "remember", "die", "buy"]
        for episode in range(3):
            await pool.reset(episode, episode, 0)
        result = await pool.use_tools(
            0,
            calling(
                call("double", number=4),
                call("double", number="x"),
                call("fail"),
                call("wait"),
                call("variable"),
                call("buy", item="tea"),
            ),
        )
        assert texts(result) == [
            "8",
            "Error: double cannot take these arguments: 'x' is not of type 'integer' of number",
            "Error: Error executing tool fail",
            "Error: wait took over 5 s",
            "a secret",
            "bought tea",
        ]
        with pytest.raises(EnvironmentFailed, match="was lost") as raised:
            await pool.use_tools(0, calling(call("die")))
        # The episode is played anew; the others have servers of their own.
        assert raised.value.by_infrastructure
        assert texts(await pool.use_tools(1, calling(call("double", number=5)))) == ["10"]
        (host,) = pool.host_pids
        servers = psutil.Process(host).children(recursive=True)
        assert servers
        os.kill(host, signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="cannot be played again"):
            await pool.step(2, "x")
        assert not psutil.wait_procs(servers, timeout=60)[1]
        await pool.reset(3, 0, 0)
        assert texts(await pool.use_tools(3, calling(call("double", number=6)))) == ["12"]

    in_pool(scenario, tools=(), mcp=OVER_PIPES, tool_timeout_seconds=5.0)


def test_a_server_over_http() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        await pool.reset(0, 0, 0)
        result = await pool.use_tools(0, calling(call("double", number=4), call("fail")))
        assert texts(result) == ["8", "Error: Error executing tool fail"]

    with listening(SCRIPT, "streamable-http") as url:
        over_http = server(url=f"{url}/mcp", headers={"Authorization": "Bearer x"})
        in_pool(scenario, tools=(), mcp=over_http, tool_timeout_seconds=20.0)


async def remembered(pool: EnvironmentPool, episode: int, name: str = "remember") -> list[str]:
    """What the episode's server knows after it was told the episode's number."""
    return texts(await pool.use_tools(episode, calling(call(name, text=str(episode)))))


def test_an_episode_has_a_server_of_its_own_until_it_ends() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        (host,) = map(psutil.Process, pool.host_pids)
        (first,) = host.children(recursive=True)
        for episode in range(3):
            await pool.reset(episode, 0, 0)
        # Nothing starts for an episode without a call.
        assert host.children(recursive=True) == [first]
        found = await asyncio.gather(*(remembered(pool, episode) for episode in (0, 1)))
        assert found == [["0"], ["1"]]
        assert await remembered(pool, 1) == ["1 1"]
        servers = host.children(recursive=True)
        assert first in servers
        assert len(servers) == 2
        await pool.close(1)
        limit, left = time.monotonic() + 60, servers
        while len(left) == 2 and time.monotonic() < limit:
            _, left = await asyncio.to_thread(psutil.wait_procs, servers, 0.2)
        assert len(left) == 1
        assert await remembered(pool, 0) == ["0 0"]

    in_pool(scenario, tools=(), mcp=OVER_PIPES, tool_timeout_seconds=60.0)


def test_a_host_shares_a_server_that_keeps_nothing_and_tools_are_chosen_and_named() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        names = [schema["function"]["name"] for schema in pool.tools]
        assert names == ["a_remember", "a_double", "b_remember", "buy"]
        for episode in (0, 1):
            await pool.reset(episode, 0, 0)
        assert await remembered(pool, 0, "a_remember") == ["0"]
        assert await remembered(pool, 1, "a_remember") == ["0 1"]
        await pool.close(1)
        assert await remembered(pool, 0, "a_remember") == ["0 1 0"]
        # The other server is another process, whose first episode this is.
        assert await remembered(pool, 0, "b_remember") == ["0"]

    command = (sys.executable, SCRIPT)
    shared = server(command=command, per="host", tools=("remember", "double"), prefix="a_")
    own = server(command=command, tools=("remember",), prefix="b_")
    in_pool(scenario, tools=(), mcp=[*shared, *own], tool_timeout_seconds=20.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": ("no-such-program",)}, "there is no program 'no-such-program'"),
        ({"command": (sys.executable, "-c", "pass")}, "does not answer"),
        ({"url": "http://127.0.0.1:9/mcp"}, "does not answer"),
        ({"command": (sys.executable, ENDLESS, "same")}, "page after page of tools without an end"),
        ({"command": (sys.executable, ENDLESS)}, "lists more than 1000 tools"),
        ({"command": ("true",), "variables": {"A": "env:EARL_TEST_MISSING"}}, "EARL_TEST_MISSING"),
        ({"command": ("sh", "-c", "echo no key >&2; exit 3")}, "its stderr ends with:\nno key"),
        ({"command": (sys.executable, ENDLESS, "none")}, "has no tools"),
        ({"command": (sys.executable, SCRIPT), "tools": ("dubble",)}, "did you mean 'double'"),
    ],
)
def test_servers_that_cannot_be_reached_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(SHOP, [], server(**settings))
    assert message in str(raised.value)


def test_an_endpoint_that_is_none_says_what_it_is() -> None:
    with listening(SCRIPT, "sse") as url:
        for path, told in (("/sse", "HTTP 405 .*SSE alone"), ("/mcp", "HTTP 404 .*ends in /mcp")):
            with pytest.raises(ConfigError, match=told):
                check(SHOP, [], server(url=url + path))
    with listening(CLOSED) as url, pytest.raises(ConfigError, match=r"HTTP 401 .*`headers`"):
        check(SHOP, [], server(url=f"{url}/mcp", headers={"Authorization": "Bearer wrong"}))
    twice = [*OVER_PIPES, *OVER_PIPES]
    with pytest.raises(ConfigError, match=r"two tools have the name 'double'.* `prefix`"):
        check(SHOP, [], twice)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either command or url"),
        ({"command": ("x",), "url": "http://x"}, "give either command or url"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://x", "variables": {"A": "b"}}, "variables are for a command"),
    ],
)
def test_the_configuration_is_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        McpConfig(**settings)
