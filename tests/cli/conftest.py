"""The command line as people use it: real processes, a tiny model, a directory of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import server, server_access
from tests import warm
from tests.listeners import Listener, watching
from tests.shared import in_memory, memory_place

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "earl_core" / "recipes" / "tictactoe_tiny.yaml"

TINY = {
    "model.path": "model",
    "model.builder_options.hidden": "32",
    "model.builder_options.layers": "1",
    "model.builder_options.heads": "2",
    "model.builder_options.warm_start_steps": "0",
    "iterations": "2",
    "rollout.prompts_per_iteration": "4",
    "rollout.group_size": "4",
    "rollout.threads": "1",
    "update.threads": "1",
    "evaluation.every": "1",
    "evaluation.episodes": "8",
    "checkpoint.every": "1",
}
"""A model of some thousand parameters; one iteration takes a moment."""

WITH_RANKS = ("train", "resume", "evaluate", "play")
"""Commands that start worker groups."""


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing names a Prefect server, and none is at the usual port. One that answers late, as on a
    busy machine, is still found: which is used is tested, and not how long it may take."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(server, "DEFAULT_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(server_access, "PROBE_SECONDS", 60.0)
    for asking in (server_access.healthy, server_access.Access.healthy, server.running_server):
        late = tuple(60.0 if default else default for default in asking.__defaults__ or ())
        monkeypatch.setattr(asking, "__defaults__", late)


class Earl:
    """Runs `earl` in a directory of its own, without touching the caller's environment.

    `run` has it and its ranks forked from processes that have imported; `start` starts it as people
    do, with its ranks below its process, where tests look.
    """

    def __init__(self, directory: Path, shared_memory: Path) -> None:
        self.directory = directory
        self.shared_memory = shared_memory
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
        self.environment = {
            **kept,
            "PYTHONPATH": str(ROOT),
            # Where services are noted, which every directory of a user finds.
            "XDG_STATE_HOME": str(directory / "state"),
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *arguments]

    def settings(self, **changes: str) -> list[str]:
        """`--set` options of the tiny model; underscores stand for dots twice over."""
        wanted = {**TINY, "dispatch.directory": str(self.shared_memory)}
        wanted |= {name.replace("__", "."): value for name, value in changes.items()}
        return [part for key, value in wanted.items() for part in ("--set", f"{key}={value}")]

    def run(
        self, *arguments: str, text: str = "", timeout: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        where = self.environment, self.directory
        ranks = arguments[0] in WITH_RANKS
        return warm.run("flows.cli", arguments, *where, text, timeout, ranks)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Whoever runs the tests under nohup hands that on.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            text=True,
        )


@pytest.fixture(scope="session")
def shared_memory() -> Iterator[Path]:
    directory = memory_place("cli")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[server.Server]:
    """One server for all commands that do not test how they come by theirs, and its password."""
    with in_memory("cli-prefect") as home, pytest.MonkeyPatch.context() as patch:
        # Importing flows.server has no effect on this process; starting one sets its variables.
        patch.setenv("PREFECT_HOME", str(home))
        for name in ("URL", "AUTH_STRING", "SSL_CERT_FILE"):
            patch.delenv(f"PREFECT_API_{name}", raising=False)
        patch.setattr(server, "DEFAULT_URL", "http://127.0.0.1:9/api")
        started = server.start(home, home)
        try:
            started.ready()
            yield started
        finally:
            started.stop()


@pytest.fixture(scope="session")
def earl(
    tmp_path_factory: pytest.TempPathFactory, shared_memory: Path, prefect_server: server.Server
) -> Earl:
    """`earl` with a Prefect server that runs already."""
    command = Earl(tmp_path_factory.mktemp("project"), shared_memory)
    command.environment |= prefect_server.access.environment()
    return command


@pytest.fixture
def fresh_earl(tmp_path: Path, shared_memory: Path) -> Earl:
    """`earl` in an empty directory, without a server."""
    return Earl(tmp_path, shared_memory)


@pytest.fixture(scope="session")
def heard() -> dict[Listener, str]:
    """What the processes of `finished_run`, and its server, listened on; filled by it."""
    return {}


@pytest.fixture(scope="session")
def finished_run(earl: Earl, heard: dict[Listener, str]) -> subprocess.CompletedProcess[str]:
    """A run named `done` of two iterations in `earl`'s directory, its update on two ranks."""
    settings = earl.settings(stages__update__replicas="2")
    with watching(os.getpid()) as seen:
        done = earl.run("train", str(CONFIG), "--name", "done", *settings)
    heard.update(seen)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
