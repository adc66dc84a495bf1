"""Runs as Prefect's server has them: a deployment under a real worker, and runs that cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.flows.runs import REPOSITORY, Runs
from tests.flows.server import ask


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


def test_sizes_that_cannot_work_stop_the_run_with_one_sentence(runs: Runs) -> None:
    output = runs.train("dispatch.max_bytes=100000", expect=1)
    assert "two versions of the model's weights must fit" in output
    assert runs.executed("sealed").count((0, "rollout")) == 0
