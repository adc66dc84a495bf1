"""Agents that are programs and services, played through the gateway."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from earl_core.environments.registry import check
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import Episode
from tests.environments.test_pool import until
from tests.rollout.asking import answering, limits
from tests.rollout.program_agent import ask
from tests.rollout.test_gateway import played

SCRIPT = str(Path(__file__).with_name("program_agent.py"))
COMMAND = [sys.executable, "-S", SCRIPT]


def play(count: int, seconds: float = 20.0, **options: Any) -> list[Episode]:
    """One episode of each prompt."""
    settings = limits(max_failed_share=1.0)
    asked = played(answering(), "program", 2 * count, settings, options, seconds)
    return asyncio.run(asked)[0][::2]


def test_a_program_prints_its_reward_and_what_it_does_wrong_costs_its_own_episode() -> None:
    does = ["number", "object", "fails", "leaves a child", "silent", "words"]
    does += ["reads nothing", "rewards", "names it twice"]
    found = play(len(does), 60.0, command=COMMAND, task={"does": does})
    told = dict(zip(does, found, strict=True))
    for name, reward in (
        ("number", 0.25),
        ("object", 0.5),
        ("leaves a child", 1.0),
        ("rewards", 0.5),
    ):
        assert (told[name].finish_reason, told[name].total_reward) == ("done", reward), told[name]
        assert told[name].samples[0].tokens
    assert told["object"].info == told["reads nothing"].info
    assert told["object"].info == {"outcome": "good", "metrics": {"n": 1}}
    failures = {name: str(each.info.get("failure")) for name, each in told.items()}
    assert "stands twice in one object: name it once" in failures["names it twice"]
    assert "exit code 3: the disk is full" in failures["fails"]
    (hung,) = play(1, 3.0, command=COMMAND, task={"does": ["hangs"]})
    assert hung.finish_reason == "environment_timeout"
    late = str(hung.info["failure"])
    assert re.search(r"step took over 3 s: the program '.*' gave no answer, .*: have it end", late)
    assert "Cancelled" not in late
    for name, last in (("silent", "''"), ("words", "'1 or 2'")):
        assert f"its last line is {last}: print the reward" in failures[name]
    sleeping = (["sleep", "3600"], ["sleep", "3601"])
    until(lambda: not any(p.info["cmdline"] in sleeping for p in psutil.process_iter(["cmdline"])))


def test_a_program_posts_its_reward_once() -> None:
    does = ["posts", "posts twice", "silent"]
    found = play(3, command=COMMAND, reward="posted", task={"does": does})
    for each in found[:2]:
        assert (each.total_reward, each.info) == (0.75, {"outcome": "posted"})
    assert found[2].finish_reason == "environment_error"
    assert "no reward was posted" in str(found[2].info["failure"])
    (other,) = play(1, command=COMMAND, reward="exit_code", task={"does": ["posts unasked"]})
    assert (other.finish_reason, other.total_reward) == ("done", 1.0), other.info


def test_an_exit_code_is_a_reward() -> None:
    found = play(2, command=COMMAND, reward="exit_code", task={"does": ["exits"]})
    assert [each.total_reward for each in found] == [1.0, 0.0]


class _Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        policy = {"OPENAI_BASE_URL": body["base_url"], "OPENAI_API_KEY": body["api_key"]}
        messages = [{"role": "user", "content": "hello"}]
        ask("chat/completions", {"model": "policy", "messages": messages}, policy)
        number = body["task"]["index"]
        if number == 1:
            self.server.over.wait()  # type: ignore[attr-defined]
        status = 503 if number == 2 else 200
        reply = json.dumps({"reward": body["task"]["plus"] + 0.5}).encode()
        self.send_response(status if self.headers["X-Key"] == "k" else 401)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    server.over = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/play"
    server.over.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def test_a_service_answers_with_the_reward(service: str) -> None:
    found = play(3, 6.0, url=service, headers={"X-Key": "k"}, task={"plus": 1})
    assert (found[0].finish_reason, found[0].total_reward) == ("done", 1.5)
    assert found[1].finish_reason == "environment_timeout"
    assert "answered 503" in str(found[2].info["failure"])
    (away,) = play(1, url="http://127.0.0.1:9/")
    assert "does not answer" in str(away.info["failure"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "command or url is missing, or both"),
        ({"command": ["x"], "url": "http://x"}, "or both are given"),
        ({"command": ["no-such-program"]}, "names no program 'no-such-program'"),
        ({"url": "ftp://x"}, "give one of http or https"),
        ({"url": "http://"}, "with a host"),
        ({"url": "http://127.0.0.1:99999/play"}, "with a host"),
        ({"url": "http://x", "reward": "exit_code"}, "which a service does not have"),
        ({"url": "http://x", "variables": {"A": "b"}}, "variables are for a command"),
        ({"command": ["true"], "rewards": "posted"}, "did you mean 'reward'"),
    ],
)
def test_options_are_checked_before_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check("agent:program", options)
