"""Stages need nothing but manifests: fresh processes do an earlier run's stages over again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from earl_core.cluster.local import LocalWorkerGroup
from earl_core.experience.statistics import merge_statistics
from tasks.session import TARGETS
from tests.flows.runs import Runs
from tests.flows.test_resume import KILLED


def group_of(role: str, runs: Runs, tmp_path: Path, stage: str) -> LocalWorkerGroup:
    """A worker group of one fresh process on the run's directory."""
    run = runs.run()
    plan = json.loads((run / "iterations" / "000001" / "select.json").read_text())
    group = LocalWorkerGroup(role, TARGETS[role], log_directory=tmp_path / "logs")
    arguments = {
        "config": yaml.safe_load((run / "config.yaml").read_text()),
        "run_directory": str(run),
    }
    group.start(plan["outputs"]["plan"]["stages"][stage], arguments)
    return group


def call(group: LocalWorkerGroup, method: str, **arguments: Any) -> dict[str, Any]:
    (result,) = group.call(method, stage=method, iteration=1, deadline_seconds=120, **arguments)
    return result


def test_stages_from_manifests_alone_in_fresh_processes(runs: Runs, tmp_path: Path) -> None:
    runs.train(fault="update.before@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    folder = runs.run() / "iterations" / "000001"
    sealed = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    rollout, reference = sealed["rollout"], sealed["reference"]

    def checksums(result: dict[str, Any]) -> list[str]:
        return [entry["checksum"] for entry in result["shards"]]

    experience = group_of("experience", runs, tmp_path, "experience")
    try:
        reward = call(experience, "reward", manifests=[rollout])
        assert checksums(reward) == checksums(sealed["reward"])
    finally:
        experience.stop()
    experience = group_of("experience", runs, tmp_path, "experience")
    try:
        inputs = [rollout, sealed["reward"], reference]
        statistics = merge_statistics([call(experience, "advantage_statistics", manifests=inputs)])
        advantage = call(experience, "advantage", manifests=inputs, statistics=statistics)
        assert checksums(advantage) == checksums(sealed["advantage"])
    finally:
        experience.stop()
    learner = group_of("update", runs, tmp_path, "update")
    try:
        call(learner, "restore", checkpoint=str(runs.run() / "checkpoints" / "000000"))
        updated = call(
            learner,
            "update",
            manifests=[rollout, reference, sealed["advantage"]],
            checkpoint=None,
            record={},
        )
    finally:
        learner.stop()
    runs.train()
    assert (
        updated["digest"] == json.loads((folder / "update.json").read_text())["outputs"]["digest"]
    )
    assert runs.shared_memory() == []
