"""A real MLflow: SQLite files in temporary directories, and one server, stopped and killed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from earl_core.config import parse_config
from earl_core.deployment.shapes import Hardware
from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory
from earl_core.run.episodes import write_episodes
from earl_core.trajectory.samples import Episode
from tasks.tracking import tracker as tracker_module
from tasks.tracking.tracker import Tracker
from tests.kept import game, seal_episodes
from tests.shared import free_port

HARDWARE = Hardware(cpu_cores=2, memory_bytes=8 * 2**30)


def until(condition: Callable[[], Any], seconds: float = 180.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Whatever a person would be shown, by anyone."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


class Server:
    """`mlflow server` on a loopback port, its processes in a group of their own."""

    def __init__(self, directory: Path, template: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        shutil.copy(template, directory / "server.db")

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"),
            *("--port", str(self.port)),
            *("--backend-store-uri", f"sqlite:///{self.directory / 'server.db'}"),
            *("--artifacts-destination", str(self.directory / "artifacts")),
        ]
        environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.directory,
                start_new_session=True,
            )
        assert until(self.healthy), (self.directory / "server.log").read_text()[-2000:]

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="session")
def template_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's migrations take seconds, so they run once."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "template.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, template_database: Path) -> Iterator[Server]:
    """Running; a test that stops or kills it makes it run again."""
    server = Server(tmp_path_factory.mktemp("server"), template_database)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that transformers loads."""
    from tests.rollout.chat_models import tiny_model

    return Path(tiny_model(tmp_path_factory.mktemp("policy") / "model"))


class Runs:
    """Opens runs and trackers, and closes what a test left open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: list[RunDirectory] = []
        self._trackers: list[Tracker] = []

    def run(self, name: str = "first", **changes: Any) -> RunDirectory:
        config = {
            "name": name,
            "iterations": 3,
            "runs_directory": str(self.path / "runs"),
            "model": {"path": str(self.path / "model")},
            "environment": {"name": "tictactoe"},
            "rollout": {"prompts_per_iteration": 2, "group_size": 4, "max_turns": 5},
            "dispatch": {"directory": str(self.path / "shards")},
            **changes,
        }
        run = RunDirectory.open(parse_config(config))
        self._runs.append(run)
        return run

    def tracker(self, run: RunDirectory, **settings: Any) -> Tracker:
        # What a test looks for must have arrived, however slow the machine is.
        tracker = Tracker(run, HARDWARE, **{"flush_seconds": 300.0, **settings})
        self._trackers.append(tracker)
        return tracker

    def close_run(self, run: RunDirectory) -> None:
        self._runs.remove(run)
        run.close()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        for run in list(self._runs):
            self.close_run(run)


@pytest.fixture
def runs(
    tmp_path: Path, template_database: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runs]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "runs").mkdir()
    shutil.copy(template_database, tmp_path / "runs" / "mlflow.db")
    found = Runs(tmp_path)
    yield found
    found.close()


Unsent = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def unsent(monkeypatch: pytest.MonkeyPatch) -> Unsent:
    """A block during which MLflow is asked for nothing new: who waited there for an answer of it
    would fail, and who was merely slow does not."""
    let_go, waited = threading.Event(), []
    let_go.set()

    def held(real: Callable[..., Any]) -> Callable[..., Any]:
        def first_wait(*given: Any) -> Any:
            waited.append(let_go.wait(120))
            return real(*given)

        return first_wait

    for name in ("open_mlflow_run", "unsent"):
        monkeypatch.setattr(tracker_module, name, held(getattr(tracker_module, name)))

    @contextmanager
    def block() -> Iterator[None]:
        let_go.clear()
        try:
            yield
        finally:
            let_go.set()
        assert all(waited), "what is in the block waited for MLflow"

    return block


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server that answers late does not count as one that is away."""
    for name in ("HTTP_REQUEST_TIMEOUT", "ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "120")


def plan(reason: str = "the only candidate") -> dict[str, Any]:
    return {"stages": {"rollout": {"replicas": 1}}, "reasons": {"rollout": reason}}


def finish(
    run: RunDirectory,
    tracker: Tracker | None,
    iteration: int,
    chosen: dict[str, Any] | None = None,
    episodes: Sequence[Episode] | None = None,
    **metrics: float,
) -> None:
    """What an iteration does: its plan, its episodes, its metrics and STABLE; then the tracker is
    told, if there is one."""
    outputs = {"plan": plan() if chosen is None else chosen}
    run.seal(
        Manifest(
            run=run.uid, iteration=iteration, stage="select", key="", policy_version=iteration,
            outputs=outputs,
        )
    )  # fmt: skip
    sealed = seal_episodes(run, iteration, [[game(iteration)] if episodes is None else episodes])
    write_episodes(run.episodes_path(iteration), run.stores, *sealed)
    run.append_metrics(iteration, {"rollout/return/mean": iteration / 10, **metrics})
    run.checkpoint_path(iteration).mkdir(exist_ok=True)
    run.mark_stable(iteration)
    if tracker is not None:
        tracker.changed()


def evaluate(run: RunDirectory, iteration: int, **metrics: float) -> None:
    """An evaluation of policy version `iteration`, with a suite."""
    passed = {"1": {"share": 0.5, "low": 0.2, "high": 0.8, "prompts": 8.0}}
    suite = {"return": 0.5, "error": 0.1, "episodes": 8, "failed": 0, "pass": passed}
    run.seal(
        Manifest(
            run=run.uid, iteration=iteration, stage="evaluation", key="", policy_version=iteration,
            metrics=metrics, outputs={"suites": {"sums": suite}},
        )
    )  # fmt: skip


def learn(
    run: RunDirectory,
    tracker: Tracker,
    policy: Path,
    iteration: int,
    value: float,
    **metrics: float,
) -> None:
    """An iteration with a checkpoint, whose policy is evaluated."""
    shutil.copytree(policy, run.checkpoint_path(iteration) / "policy")
    finish(run, None, iteration)
    evaluate(run, iteration + 1, **{"return/mean": value, **metrics})
    run.prune_checkpoints()
    tracker.changed()


def history(uri: str, run_id: str | None, key: str = "1_learning/return") -> dict[int, float]:
    from mlflow import MlflowClient

    assert run_id is not None
    rows = MlflowClient(tracking_uri=uri).get_metric_history(run_id, key)
    assert len({row.step for row in rows}) == len(rows), "a step was sent twice"
    return {row.step: row.value for row in rows}
