"""Runs over two hosts of a Ray cluster, in namespaces of this machine."""

from __future__ import annotations

import json
import sys
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


def train(hosts: TwoHosts, directory: Path, name: str, settings: dict[str, Any]) -> str:
    given = {**SETTINGS, "name": name, **settings}
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    return hosts.run(
        0,
        *(sys.executable, "-m", "flows.cli", "train", "tictactoe_tiny", "--plain", *words),
        directory=directory,
        seconds=500,
    )


def weights(directory: Path, name: str) -> bytes:
    (*_, last) = sorted((directory / "runs" / name / "checkpoints").iterdir())
    return (last / "policy" / "model.safetensors").read_bytes()


def hosts_of(directory: Path, name: str, stage: str) -> set[str]:
    path = directory / "runs" / name / "iterations" / "000001" / f"{stage}.json"
    return {shard["host"] for shard in json.loads(path.read_text())["shards"]}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_over_two_hosts_equals_one_on_two_parts_of_a_machine(
    two_hosts: TwoHosts, tmp_path: Path
) -> None:
    train(two_hosts, tmp_path, "here", {"cluster.hosts": 2})
    cluster = {
        "cluster.backend": "ray",
        "cluster.address": two_hosts.address,
        "cluster.hosts": 2,
    }
    train(two_hosts, tmp_path, "there", cluster)
    assert weights(tmp_path, "here") == weights(tmp_path, "there")
    assert hosts_of(tmp_path, "there", "rollout") == {"host-0", "host-1"}
    metrics = (tmp_path / "runs" / "there" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == ITERATIONS
    assert all(json.loads(line)["update/grad_norm"] > 0 for line in metrics)
    for number in (0, 1):
        assert two_hosts.shared_memory(number) == []
        assert two_hosts.ranks(number) == []
