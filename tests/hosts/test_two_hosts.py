"""Runs over two hosts of a Ray cluster, in namespaces of this machine."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import TwoHosts

ITERATIONS = 3
SETTINGS = {
    "iterations": ITERATIONS,
    "evaluation.every": 0,
    "tracking.enabled": "false",
    "stages.rollout.replicas": 2,
    "stages.update.replicas": 2,
    "rollout.threads": 1,
    "update.threads": 1,
}


def command(name: str, settings: dict[str, Any]) -> list[str]:
    given = {**SETTINGS, "name": name, **settings}
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "flows.cli", "train", "tictactoe_tiny", "--plain", *words]


def over(hosts: TwoHosts) -> dict[str, Any]:
    return {"cluster.backend": "ray", "cluster.address": hosts.address, "cluster.hosts": 2}


@pytest.fixture(scope="module")
def directory(two_hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are started; it has the run `here`, on two parts of host-0."""
    made = tmp_path_factory.mktemp("runs")
    two_hosts.run(0, *command("here", {"cluster.hosts": 2}), directory=made)
    return made


def weights(directory: Path, name: str) -> bytes:
    (*_, last) = sorted((directory / "runs" / name / "checkpoints").iterdir())
    return (last / "policy" / "model.safetensors").read_bytes()


def hosts_of(directory: Path, name: str, stage: str) -> set[str]:
    path = directory / "runs" / name / "iterations" / "000001" / f"{stage}.json"
    return {shard["host"] for shard in json.loads(path.read_text())["shards"]}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_over_two_hosts_equals_one_on_two_parts_of_a_machine(
    two_hosts: TwoHosts, directory: Path
) -> None:
    two_hosts.run(0, *command("there", over(two_hosts)), directory=directory)
    assert weights(directory, "here") == weights(directory, "there")
    assert hosts_of(directory, "there", "rollout") == {"host-0", "host-1"}
    metrics = (directory / "runs" / "there" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == ITERATIONS
    assert all(json.loads(line)["update/grad_norm"] > 0 for line in metrics)
    for number in (0, 1):
        assert two_hosts.shared_memory(number) == []
        assert two_hosts.ranks(number) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_lost_host_ends_the_run_which_resumes_when_it_is_back(
    two_hosts: TwoHosts, directory: Path
) -> None:
    process = two_hosts.popen(0, *command("lost", over(two_hosts)), directory=directory)
    wait_for(directory / "runs" / "lost" / "ledger.jsonl", "update", 1)
    two_hosts.kill()
    killed = time.monotonic()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output
    assert time.monotonic() - killed < 120
    assert sum(line.startswith("error: ") for line in output.splitlines()) == 1, output
    assert "host host-1 is lost" in output
    assert two_hosts.ranks(0) == []
    two_hosts.join()
    resume = [sys.executable, "-m", "flows.cli", "resume", "lost", "--plain"]
    two_hosts.run(0, *resume, directory=directory)
    assert weights(directory, "here") == weights(directory, "lost")
    for number in (0, 1):
        assert two_hosts.shared_memory(number) == []
        assert two_hosts.ranks(number) == []


def wait_for(ledger: Path, stage: str, iteration: int, seconds: float = 120.0) -> None:
    """Until the run has begun this stage."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        for line in map(json.loads, lines):
            if (line["stage"], line["iteration"], line["event"]) == (stage, iteration, "started"):
                return
        time.sleep(0.02)
    raise AssertionError(f"{stage} {iteration} did not begin")
