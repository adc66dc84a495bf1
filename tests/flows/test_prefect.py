"""What Prefect's server sees: states, edges of the graph, deployments run by a real worker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.runs import REPOSITORY, Runs


def ask(runs: Runs, path: str, body: dict[str, Any] | None = None) -> Any:
    """POST to the server's API (GET without a body)."""
    url = f"{runs.environment['PREFECT_API_URL']}/{path}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def flow_runs(runs: Runs, **states: list[str]) -> list[dict[str, Any]]:
    chosen = {"flow_runs": {"state": {"type": states}}} if states else {}
    found: list[dict[str, Any]] = ask(runs, "flow_runs/filter", chosen)
    return found


def test_a_killed_run_is_freed_and_finished_stages_show_as_cached(runs: Runs) -> None:
    runs.train(fault="update.before@0=kill", expect=-9)
    mine = str(runs.config)
    left = [run for run in flow_runs(runs, any_=["RUNNING"]) if mine in run["name"]]
    assert len(left) == 1
    runs.train()
    assert ask(runs, f"flow_runs/{left[0]['id']}")["state_type"] == "CRASHED"
    resumed = [
        run
        for run in flow_runs(runs, any_=["COMPLETED"])
        if run["name"] == f"{runs.run()} iteration 0"
    ]
    (iteration,) = resumed
    tasks = ask(runs, "task_runs/filter", {"flow_runs": {"id": {"any_": [iteration["id"]]}}})
    states = {task["name"]: task["state_name"] for task in tasks}
    assert states == {
        "select 0": "Cached",
        "rollout 0": "Cached",
        "reward 0": "Cached",
        "reference 0": "Cached",
        "advantage 0": "Cached",
        "update 0": "Completed",
        "publish 0": "Completed",
    }
    names = {task["id"]: task["name"] for task in tasks}
    edges = {
        (names[source["id"]], task["name"])
        for task in tasks
        for sources in task["task_inputs"].values()
        for source in sources
        if source.get("id") in names
    }
    assert ("rollout 0", "advantage 0") in edges
    assert ("advantage 0", "update 0") in edges
    assert ("update 0", "publish 0") in edges


@pytest.mark.slow
def test_iteration_deployment_runs_under_a_real_worker(runs: Runs, tmp_path: Path) -> None:
    """Deploy as prefect.yaml says, start a worker, run `iteration` of a run that exists."""
    runs.train("iterations=1")
    config = runs.run() / "config.yaml"
    stored = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**stored, "iterations": 3}))

    project = tmp_path / "project"
    project.mkdir()
    for part in ("flows", "tasks", "earl_core", "prefect.yaml"):
        source = REPOSITORY / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, project / part)
    environment = {**runs.environment, "PREFECT_WORKER_QUERY_SECONDS": "2"}

    def prefect(*arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=project,
            env=environment,
            check=True,
            timeout=180,
            stdout=subprocess.DEVNULL,
        )

    prefect("work-pool", "create", "earl", "--type", "process")
    prefect("--no-prompt", "deploy", "--all")
    worker = subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", "earl"],
        cwd=project,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deployment = ask(runs, "deployments/name/iteration/iteration")
        assert "run" in deployment["parameter_openapi_schema"]["properties"]
        created = ask(
            runs,
            f"deployments/{deployment['id']}/create_flow_run",
            {"parameters": {"run": str(runs.run())}},
        )
        deadline = time.monotonic() + 180
        state = "SCHEDULED"
        while state in ("SCHEDULED", "PENDING", "RUNNING"):
            assert time.monotonic() < deadline, state
            time.sleep(1)
            state = ask(runs, f"flow_runs/{created['id']}")["state_type"]
        assert state == "COMPLETED"
    finally:
        os.killpg(worker.pid, 15)
        worker.wait(60)
    assert (runs.run() / "checkpoints" / "000001" / "STABLE").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dispatch.max_bytes=100000", "two versions of the model's weights must fit"),
        ("rollout.max_model_len=8", "first prompt has"),
    ],
)
def test_sizes_that_cannot_work_stop_the_run_with_one_sentence(
    runs: Runs, override: str, message: str
) -> None:
    assert message in runs.train(override, expect=1)
    assert runs.executed("sealed").count((0, "rollout")) == 0
