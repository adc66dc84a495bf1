"""One run that is killed before its last update, loses shards, goes on, and is started again.

Meanwhile fresh processes do its stages over from manifests alone, and Prefect's server is asked
what it saw.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from earl_core.algorithms.moments import merge_statistics
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.control.worker_groups import TARGETS
from flows.reaper import reconcile
from tests.flows.runs import KILLED, Runs
from tests.flows.server import access, ask, flow_runs


@dataclass(frozen=True)
class Story:
    """The run after its end, and what was seen on the way."""

    runs: Runs
    sealed: dict[str, Any]
    left_running: list[dict[str, Any]]
    redone: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def story(module_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Story:
    runs = module_runs
    runs.train(fault="update.before@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    folder = runs.run() / "iterations" / "000001"
    sealed = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    mine = str(runs.config)
    left = [
        run
        for run in flow_runs(runs, "train run", "RUNNING")
        if mine == run["parameters"].get("config")
    ]
    redone = redo(runs, sealed, tmp_path_factory.mktemp("logs"))
    for stage in ("reward", "advantage"):
        lost = sealed[stage]["shards"][0]["file"]
        (shard,) = (path for path in runs.shared_memory() if path.name == lost)
        shard.unlink()
    runs.train()
    return Story(runs, sealed, left, redone)


def redo(runs: Runs, sealed: dict[str, Any], logs: Path) -> dict[str, dict[str, Any]]:
    """What fresh processes make of the sealed manifests of iteration 1, stage by stage."""

    def in_fresh_group(role: str, work: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        group = WorkerGroup(role, TARGETS[role], log_directory=logs)
        arguments = {
            "config": yaml.safe_load((runs.run() / "config.yaml").read_text()),
            "run_directory": str(runs.run()),
        }
        group.start(sealed["select"]["outputs"]["plan"]["stages"][role], arguments)

        def call(method: str, **given: Any) -> dict[str, Any]:
            at: dict[str, Any] = {"stage": method, "iteration": 1, "deadline_seconds": 120}
            (result,) = group.call(method, **at, **given)
            return result

        try:
            return work(call)
        finally:
            group.stop()

    def advantage(call: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        inputs = [sealed[stage] for stage in ("rollout", "reward", "reference")]
        statistics = merge_statistics([call("advantage_statistics", manifests=inputs)])
        return call("advantage", manifests=inputs, statistics=statistics)

    def update(call: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        call("restore", checkpoint=str(runs.run() / "checkpoints" / "000000"))
        inputs = [sealed[stage] for stage in ("rollout", "reference", "advantage")]
        return call("update", manifests=inputs, checkpoint=None, record={})

    rollout = [sealed["rollout"]]
    return {
        "reward": in_fresh_group("experience", lambda call: call("reward", manifests=rollout)),
        "advantage": in_fresh_group("experience", advantage),
        "update": in_fresh_group("update", update),
    }


def test_stages_need_nothing_but_manifests(story: Story) -> None:
    for stage in ("reward", "advantage"):
        found = [entry["checksum"] for entry in story.redone[stage]["shards"]]
        assert found == [entry["checksum"] for entry in story.sealed[stage]["shards"]]
    manifest = story.runs.run() / "iterations" / "000001" / "update.json"
    digest = json.loads(manifest.read_text())["outputs"]["digest"]
    assert story.redone["update"]["digest"] == digest


def test_a_lost_shard_repeats_its_stage_only(
    story: Story, undisturbed: Callable[..., Runs]
) -> None:
    started = story.runs.executed("started")
    assert started.count((1, "advantage")) == 2
    assert started.count((1, "rollout")) == started.count((1, "reward")) == 1
    # Kept episodes have the rows of rewards, too.
    assert (1, "reward") in story.runs.executed("rows from the kept episodes")
    assert story.runs.weights(1) == undisturbed().weights(1)


def recorded(runs: Runs, iteration: str) -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Of the tasks of a flow run: their states by name, and which takes what another gives."""
    tasks = ask(runs, "task_runs/filter", {"flow_runs": {"id": {"any_": [iteration]}}})
    names = {task["id"]: task["name"] for task in tasks}
    edges = {
        (names[source["id"]], task["name"])
        for task in tasks
        for sources in task["task_inputs"].values()
        for source in sources
        if source.get("id") in names
    }
    return {task["name"]: task["state_name"] for task in tasks}, edges


def test_prefect_frees_the_killed_run_and_shows_finished_stages_as_cached(story: Story) -> None:
    runs = story.runs
    (left,) = story.left_running
    # What the second training does at its start and, where the server is busy then, later.
    reconcile(access(runs), runs.directory / "runs", timeout=60)
    assert ask(runs, f"flow_runs/{left['id']}")["state_type"] == "CRASHED"
    (iteration,) = (
        run
        for run in flow_runs(runs, f"{runs.run().name} 1", "COMPLETED")
        if run["parameters"].get("run") == str(runs.run())
    )
    wanted = {
        "select 1": "Cached",
        "rollout 1": "Cached",
        "reward 1": "Cached",
        "reference 1": "Cached",
        "advantage 1": "Completed",
        "update 1": "Completed",
        "publish 1": "Completed",
    }
    # The server records the states of tasks some time after they have ended.
    deadline = time.monotonic() + 120
    while recorded(runs, iteration["id"])[0] != wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    states, edges = recorded(runs, iteration["id"])
    assert states == wanted
    assert ("rollout 1", "advantage 1") in edges
    assert ("advantage 1", "update 1") in edges
    assert ("update 1", "publish 1") in edges


def test_a_finished_run_is_left_alone(story: Story) -> None:
    runs = story.runs
    before, weights = runs.executed("started"), runs.weights(1)
    runs.train()
    assert runs.executed("started") == before
    assert runs.weights(1) == weights
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()
