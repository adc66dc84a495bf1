"""Runs as Prefect's server has them: deployments under a real worker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from earl_core.run.lock import RunLock
from tests.flows.runs import REPOSITORY, Runs
from tests.flows.server import ask

_POLLS = (
    *("PREFECT_WORKER_QUERY_SECONDS", "PREFECT_WORKER_CANCELLATION_POLL_SECONDS"),
    "PREFECT_RUNNER_POLL_FREQUENCY",
)

_EXITED = " exited "
"""Is in the worker's line about each process of a flow that has ended."""


@contextmanager
def worker(runs: Runs, project: Path, **more: str) -> Iterator[None]:
    """Deploy as prefect.yaml says, and a worker."""
    project.mkdir()
    for part in ("flows", "tasks", "earl_core", "prefect.yaml"):
        source = REPOSITORY / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, project / part)
    environment = {**runs.environment, **dict.fromkeys(_POLLS, "1"), **more}
    output = (project / "worker.log").open("w")

    def prefect(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "prefect", *arguments]

    for command in (
        prefect("work-pool", "create", "earl", "--type", "process"),
        prefect("--no-prompt", "deploy", "--all"),
    ):
        subprocess.run(
            command, cwd=project, env=environment, check=True, timeout=360, stdout=output
        )
    started = subprocess.Popen(
        prefect("worker", "start", "--pool", "earl"),
        cwd=project,
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(started.pid, 15)
        started.wait(240)
        output.close()


def until(true: Callable[[], object], seconds: float, told: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


class Submitted:
    """A flow run of a deployment."""

    def __init__(self, runs: Runs, flow: str, **parameters: Any) -> None:
        self._runs = runs
        self._log = runs.directory / "project" / "worker.log"
        deployment = ask(runs, f"deployments/name/{flow}/{flow}")["id"]
        path = f"deployments/{deployment}/create_flow_run"
        self.id = ask(runs, path, {"parameters": parameters})["id"]

        self._exits = self._log.read_text().count(_EXITED)

    def seen(self) -> dict[str, Any]:
        found: dict[str, Any] = ask(self._runs, f"flow_runs/{self.id}")
        return found

    def state(self) -> str:
        return str(self.seen()["state_name"])

    def message(self) -> str:
        return str(self.seen()["state"]["message"])

    def set_state(self, kind: str, name: str) -> None:
        ask(self._runs, f"flow_runs/{self.id}/set_state", {"state": {"type": kind, "name": name}})

    def until(self, *names: str, seconds: float = 480) -> None:
        ended = (*names, "Failed", "Crashed", "Cancelled", "Completed")
        until(lambda: self.state() in ended, seconds, lambda: (self.state(), self.logs()))
        assert self.state() in names, (self.message(), self.logs())

    def wait_for_process(self) -> None:
        """Until the worker knows how the flow's process ended; before, a retry would be crashed."""
        exits = self._log.read_text
        until(lambda: exits().count(_EXITED) > self._exits, 360, exits)

    def retry(self) -> None:
        """Prefect's own Retry, the same flow run again, until it is completed and its process is
        over. The worker writes its lines before it tells the server; where that ends the retry, it
        is asked for anew."""
        for _ in range(3):
            time.sleep(3)
            self._exits = self._log.read_text().count(_EXITED)
            self.set_state("SCHEDULED", "AwaitingRetry")
            self.until("Completed", "Crashed", "Cancelled")
            if self.state() == "Completed":
                # Its line would be taken for that of the next flow run.
                self.wait_for_process()
                return
        raise AssertionError((self.message(), self.logs()))

    def logs(self) -> str:
        """The last lines of all attempts."""
        chosen = {"logs": {"flow_run_id": {"any_": [self.id]}}, "limit": 200}
        found = ask(self._runs, "logs/filter", {**chosen, "sort": "TIMESTAMP_DESC"})
        return "\n".join(line["message"] for line in reversed(found))

    def pages(self) -> list[dict[str, Any]]:
        chosen = {"artifacts": {"flow_run_id": {"any_": [self.id]}}}
        found: list[dict[str, Any]] = ask(self._runs, "artifacts/filter", chosen)
        return found

    def stages(self) -> dict[str, str]:
        """The state of each task run, by its name; of the last attempt."""
        chosen = {"flow_runs": {"id": {"any_": [self.id]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return {t["name"]: t["state_name"] for t in ask(self._runs, "task_runs/filter", chosen)}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_flow_runs_queue_are_cancelled_and_retried_from_the_server(
    runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "once").mkdir()
    fault = {
        "EARL_FAULT": "update.step0@1=kill;update.step0@2=hang",
        "EARL_FAULT_ONCE": str(tmp_path / "once"),
    }
    with worker(runs, tmp_path / "project", **fault):
        _training_fails_with_a_sentence_and_is_retried(runs)
        _iteration_waits_for_its_run_is_cancelled_and_retried(runs)
    # Prefect itself prints others, of a server that answered late.
    log = (tmp_path / "project" / "worker.log").read_text()
    assert not re.search(r'File ".*/(flows|tasks|earl_core)/', log), log


def _training_fails_with_a_sentence_and_is_retried(runs: Runs) -> None:
    flow_run = Submitted(
        runs, "train", config=str(runs.config), iterations=2, overrides=["deadlines.repeats=0"]
    )
    flow_run.until("Failed")
    flow_run.wait_for_process()
    assert flow_run.seen()["name"] == "train run"
    assert flow_run.message().startswith("Worker group 'update', rank 0")
    assert flow_run.message().endswith(f". Continue with: earl resume {runs.run()}")
    assert "iteration 0: return" in flow_run.logs()
    flow_run.retry()
    # One page of each kind, as the run stands now; what only we read stands beside no name.
    assert set(flow_run.seen()["tags"]) == {"earl", "run", "train"}
    pages = flow_run.pages()
    assert {page["key"] for page in pages} == {"run-curve", "run-plan", "run-episodes"}
    # Those of the first attempt, and those of the second, which went on with iteration 1.
    told = sorted(page["description"] for page in pages if page["key"] == "run-curve")
    assert told == [f"The learning curve after {n}" for n in ("1 iteration", "2 iterations")]
    assert [runs.executed("sealed").count((1, s)) for s in ("rollout", "reward", "update")] == [
        1
    ] * 3


def _iteration_waits_for_its_run_is_cancelled_and_retried(runs: Runs) -> None:
    config = runs.run() / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "iterations": 3}))
    lock = RunLock(runs.run())
    try:
        flow_run = Submitted(runs, "iteration", run=str(runs.run()))
        flow_run.until("Waiting for run")
        assert f"in use by process {os.getpid()}" in flow_run.message()
        assert flow_run.seen()["state_type"] == "RUNNING"
    finally:
        lock.release()
    until((runs.directory / "once" / "update.step0@2").exists, 480, flow_run.logs)
    flow_run.set_state("CANCELLING", "Cancelling")
    runs.wait_for_workers_to_end(240)
    flow_run.until("Cancelled")
    flow_run.wait_for_process()
    flow_run.retry()
    states = flow_run.stages()
    done = ("select", "rollout", "reward", "advantage")
    assert {states[f"{stage} 2"] for stage in done} == {"Cached"}
    assert states["update 2"] == "Completed"
    assert runs.executed("sealed").count((2, "rollout")) == 1
    assert flow_run.seen()["name"] == "run 2"
    assert set(flow_run.seen()["tags"]) == {"earl", "run", "iteration"}
    assert "iteration 2: return" in flow_run.logs()
    assert (runs.run() / "checkpoints" / "000002" / "STABLE").exists()
    pages = {page["key"]: page["data"] for page in flow_run.pages()}
    assert set(pages) == {"run-plan", "run-curve", "run-episodes"}
    assert "data:image/svg+xml;base64," in pages["run-curve"]
    _form_offers(runs)


def _form_offers(runs: Runs) -> None:
    """The run among those that other tests have begun on this server; one of them is given."""
    form = ask(runs, "deployments/name/iteration/iteration")
    choices = form["parameter_openapi_schema"]["properties"]["run"]["anyOf"]
    assert str(runs.run()) in choices[0]["enum"]
    assert form["parameters"]["run"] in choices[0]["enum"]
