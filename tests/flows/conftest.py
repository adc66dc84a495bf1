"""One Prefect server and one tiny model for all tests of flows."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.flows.runs import Runs
from tests.shared import free_port, made_once, memory_place, session_process

_SERVED = """
"$1" -m tests.flows.prefect_server server start --port "$2" >"$3/server.log" 2>&1 &
tail --pid="$4" -f /dev/null
trap "" TERM
kill 0
sleep 3
rm -rf "$3"
kill -KILL 0
"""
"""A shell's: a server that ends with a process, and its home."""


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of a real Prefect server on a free loopback port, which all workers of
    a session share."""
    file = "environment.json"

    def start(place: Path) -> None:
        (place / file).write_text(json.dumps(_start_server()))

    found: dict[str, str] = json.loads(
        (made_once(tmp_path_factory, "prefect", start) / file).read_text()
    )
    return found


def _start_server() -> dict[str, str]:
    port, session = free_port(), session_process()
    home = memory_place("prefect", session)
    home.mkdir(mode=0o700)
    environment = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_API_AUTH_STRING": "tests:word",
        "PREFECT_API_AUTH_STRING": "tests:word",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    server = subprocess.Popen(
        ["sh", "-c", _SERVED, "sh", sys.executable, str(port), str(home), str(session)],
        env={**os.environ, **environment},
        start_new_session=True,
    )
    # All tests of flows wait for it, and none would go on without it.
    deadline = time.monotonic() + 400
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=20)
            return environment
        except OSError:
            if time.monotonic() > deadline or server.poll() is not None:
                log = (home / "server.log").read_text()
                os.killpg(server.pid, signal.SIGKILL)
                raise RuntimeError(log) from None
            time.sleep(0.5)


def _prepared(directory: Path, prefect_server: dict[str, str], model: Path) -> Runs:
    config = {
        "name": "run",
        "iterations": 2,
        "runs_directory": str(directory / "runs"),
        "model": {"path": str(model)},
        "environment": {"name": "tic_tac_toe", "options": {"style": "compact"}},
        "rollout": {
            "engine": "torch",
            "prompts_per_iteration": 4,
            "group_size": 4,
            "max_turns": 5,
            "max_tokens_per_turn": 2,
            "dtype": "float32",
            "threads": 1,
        },
        "algorithm": {"advantage": "rloo", "kl": {"placement": "loss", "coefficient": 0.01}},
        "update": {
            "precision": "fp32",
            "learning_rate": 1e-3,
            "minibatches": 2,
            "threads": 1,
        },
        "dispatch": {"directory": str(directory / "shm")},
        "tracking": {"enabled": False},
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return Runs(path, directory, model, {**os.environ, **prefect_server})


@pytest.fixture
def runs(tmp_path: Path, prefect_server: dict[str, str], tiny_model: Path) -> Iterator[Runs]:
    """Starts training processes on a small configuration in a directory of the test's own."""
    started = _prepared(tmp_path, prefect_server, tiny_model)
    yield started
    started.kill_all()


@pytest.fixture(scope="module")
def module_runs(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: dict[str, str], tiny_model: Path
) -> Iterator[Runs]:
    """As `runs`, for a story that several tests look at."""
    started = _prepared(tmp_path_factory.mktemp("story"), prefect_server, tiny_model)
    yield started
    started.kill_all()


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: dict[str, str], tiny_model: Path
) -> Callable[..., Runs]:
    """Runs that nothing happened to, one for each set of overrides, made when first asked for.

    Who compares with one compares with a run that learnt, and would have learnt something else
    from other data: a run of another seed beside it (`other`) ends with other weights.
    """
    made: dict[tuple[str, ...], Runs] = {}

    def undisturbed_run(*overrides: str) -> Runs:
        if overrides not in made:
            digest = hashlib.sha256(repr(overrides).encode()).hexdigest()[:16]

            def train(directory: Path) -> None:
                runs = _prepared(directory, prefect_server, tiny_model)
                try:
                    _train_both(runs, overrides)
                finally:
                    runs.kill_all()

            directory = made_once(tmp_path_factory, f"undisturbed-{digest}", train)
            made[overrides] = _prepared(directory, prefect_server, tiny_model)
        return made[overrides]

    return undisturbed_run


def _train_both(runs: Runs, overrides: tuple[str, ...]) -> None:
    other = [*overrides, "seed=1", "name=other"]
    if any("stages." in override for override in overrides):
        runs.train(*overrides)
        runs.train(*other)
    else:
        both = runs.train_here({"overrides": overrides}, {"overrides": other})
        assert both == [None, None]
    runs.assert_learnt(than="other")
