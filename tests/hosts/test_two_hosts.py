"""Runs over two hosts of a Ray cluster, in namespaces of this machine."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from earl_core.run.kept_episodes import read_episodes
from earl_core.weights.load import model_files
from tests.learnt import largest_change, weights_in
from tools.harness import REPOSITORY
from tools.namespaces import TwoHosts

ITERATIONS = 3
SETTINGS = {
    "iterations": ITERATIONS,
    # A model of some thousand parameters that knows what a move looks like, not which are legal.
    "model.builder_options.hidden": 32,
    "model.builder_options.layers": 2,
    "model.builder_options.warm_start_steps": 20,
    "model.builder_options.warm_start_learning_rate": 1e-2,
    "rollout.prompts_per_iteration": 8,
    "rollout.group_size": 4,
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


def last_policy(directory: Path, name: str) -> Path:
    (*_, last) = sorted((directory / "runs" / name / "checkpoints").iterdir())
    return last / "policy"


def largest_difference(directory: Path, one: str, other: str) -> float:
    """Of the last weights of two runs, which each host has written a file of."""
    first, second = (weights_in(last_policy(directory, name)) for name in (one, other))
    assert first.keys() == second.keys()
    return largest_change(first, second)


def episodes(directory: Path, name: str, iteration: int) -> list[dict[str, Any]]:
    path = directory / "runs" / name / "iterations" / f"{iteration:06d}" / "episodes.parquet"
    return read_episodes(path, None, 10_000)


def hosts_of(directory: Path, name: str, stage: str, iteration: int = 1) -> set[str]:
    path = directory / "runs" / name / "iterations" / f"{iteration:06d}" / f"{stage}.json"
    return {shard["host"] for shard in json.loads(path.read_text())["shards"]}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_over_two_hosts_equals_one_on_two_parts_of_a_machine(
    two_hosts: TwoHosts, directory: Path
) -> None:
    two_hosts.run(0, *command("there", over(two_hosts)), directory=directory)
    assert largest_difference(directory, "here", "there") == 0.0
    assert len(model_files(last_policy(directory, "there"))) == 2
    assert hosts_of(directory, "there", "rollout") == {"host-0", "host-1"}
    metrics = (directory / "runs" / "there" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == ITERATIONS
    assert all(json.loads(line)["update/grad_norm"] > 0 for line in metrics)
    assert all(json.loads(line)["update/remote_bytes"] > 0 for line in metrics)
    seen = directory / "runs" / "there" / "iterations" / "000000" / "selection.input"
    assert json.loads(seen.read_text())["hardware"]["fetch_bandwidth"] > 1e6
    for iteration in range(ITERATIONS):
        here, there = (episodes(directory, name, iteration) for name in ("here", "there"))
        assert len(here) > 0
        assert here == there
    assert_nothing_is_left(two_hosts)


STALE = {"algorithm.importance_correction": "{}", "stages.placement": "shared"}


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_iterations_overlap_over_two_hosts_as_on_two_parts_of_a_machine(
    two_hosts: TwoHosts, directory: Path
) -> None:
    ahead = {**STALE, "schedule.staleness": 1, "iterations": 4}
    two_hosts.run(0, *command("ahead", {**ahead, "cluster.hosts": 2}), directory=directory)
    two_hosts.run(0, *command("ahead-there", ahead | over(two_hosts)), directory=directory)
    assert largest_difference(directory, "ahead", "ahead-there") == 0.0
    assert largest_difference(directory, "here", "ahead-there") > 0.0
    assert hosts_of(directory, "ahead-there", "rollout", 3) == {"host-0", "host-1"}
    lines = (directory / "runs" / "ahead-there" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update/age_max"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    assert_nothing_is_left(two_hosts)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_a_stream_over_two_hosts_trains_each_group_once(
    two_hosts: TwoHosts, directory: Path
) -> None:
    stream = {**STALE, "schedule": "{staleness: 2, mode: stream}", "iterations": 4}
    two_hosts.run(0, *command("stream", stream | over(two_hosts)), directory=directory)
    groups = int(SETTINGS["rollout.prompts_per_iteration"])
    for iteration in range(4):
        path = directory / f"runs/stream/iterations/{iteration:06d}/episodes.parquet"
        rows = pq.read_table(path).to_pylist()
        wanted = range(iteration * groups, (iteration + 1) * groups)
        assert {row["group_id"] for row in rows} == set(wanted)
        sampled = {v for row in rows for v in row["token_versions"] if v >= 0}
        assert iteration - 2 <= min(sampled) <= max(sampled) <= iteration
    assert_nothing_is_left(two_hosts)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_doctor_looks_at_both_hosts(two_hosts: TwoHosts, directory: Path) -> None:
    file = directory / "run.yaml"
    recipe = (REPOSITORY / "earl_core" / "recipes" / "tictactoe_tiny.yaml").read_text()
    cluster = {"backend": "ray", "address": two_hosts.address, "hosts": 2}
    file.write_text(f"{recipe}\ncluster: {json.dumps(cluster)}\n")
    doctor = [sys.executable, "-m", "flows.cli", "doctor", str(file)]
    told = two_hosts.run(0, *doctor, directory=directory)
    for host in ("host-0 at 10.99.0.1", "host-1 at 10.99.0.2"):
        assert f"✓ {host}: 1 CPU cores" in told
    assert "0 findings block a run" in told


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_goes_on_without_a_lost_host_and_with_it_when_it_is_back(
    two_hosts: TwoHosts, directory: Path
) -> None:
    last, gate = 5, directory / "gate"
    # From the update of iteration 1 on, however late anybody looks.
    after = directory / "runs" / "goes-on" / "iterations" / "000001" / "rollout.json"
    held = {"name": "tests.hosts.gate:HeldLoss", "gate": str(gate), "after": str(after)}
    gate.touch()
    settings = {
        **over(two_hosts),
        "cluster.hosts": "1..2",
        "stages.rollout.replicas": 1,
        "stages.update.replicas": 1,
        "checkpoint.every": 1,
        "iterations": last + 1,
        "algorithm.policy_loss": json.dumps(held),
    }
    process = two_hosts.popen(0, *command("goes-on", settings), directory=directory)
    ledger = directory / "runs" / "goes-on" / "ledger.jsonl"
    wait_for(ledger, "update", 1)
    two_hosts.kill()
    killed = time.monotonic()
    wait_for(ledger, "update", 1, times=2)
    print(f"the update was repeated after {time.monotonic() - killed:.1f} s")
    two_hosts.join()
    gate.unlink()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "host host-1 is lost" in output
    assert "a further host has joined" in output
    metrics = (directory / "runs" / "goes-on" / "metrics.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["iteration"] for line in metrics}) == list(range(last + 1))
    players = [hosts_of(directory, "goes-on", "rollout", k) for k in range(2, last + 1)]
    assert {"host-0", "host-1"} in players
    states = flow_states(directory, "goes-on %")
    assert states.pop("CANCELLED Repeated") >= 1
    assert list(states) == ["COMPLETED Completed"]
    assert_nothing_is_left(two_hosts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.campaign
def test_a_cut_link_ends_a_run_that_needs_both_hosts_and_a_resume_gives_the_same(
    two_hosts: TwoHosts, directory: Path
) -> None:
    settings = {**over(two_hosts), "deadlines.start": 60}
    process = two_hosts.popen(0, *command("cut", settings), directory=directory)
    wait_for(directory / "runs" / "cut" / "ledger.jsonl", "update", 1)
    two_hosts.cut()
    cut = time.monotonic()
    output, _ = process.communicate(timeout=200)
    print(f"the run ended after {time.monotonic() - cut:.1f} s")
    assert process.returncode == 1, output
    assert sum(line.startswith("error: ") for line in output.splitlines()) == 1, output
    assert "host host-1 is lost" in output
    assert two_hosts.ranks(0) == []
    assert two_hosts.ranks(1, seconds=60) == []
    two_hosts.mend()
    two_hosts.kill()
    two_hosts.join()
    resume = [sys.executable, "-m", "flows.cli", "resume", "cut", "--plain"]
    two_hosts.run(0, *resume, directory=directory)
    assert largest_difference(directory, "here", "cut") == 0.0
    assert_nothing_is_left(two_hosts)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["host", "daemon", "controller"])
@pytest.mark.parametrize("stage", ["rollout", "reward", "advantage", "update", "publish"])
def test_a_kill_in_any_stage_changes_no_weights(
    two_hosts: TwoHosts, directory: Path, stage: str, victim: str
) -> None:
    name = f"{victim}-{stage}"
    process = two_hosts.popen(0, *command(name, over(two_hosts)), directory=directory)
    wait_for(directory / "runs" / name / "ledger.jsonl", stage, 1)
    if victim == "controller":
        killed = time.monotonic()
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.communicate(timeout=60)
        assert two_hosts.ranks(0, seconds=30) == two_hosts.ranks(1, seconds=30) == []
        print(f"the ranks ended within {time.monotonic() - killed:.1f} s")
        resume = [sys.executable, "-m", "flows.cli", "resume", name, "--plain"]
        two_hosts.run(0, *resume, directory=directory)
    else:
        if victim == "daemon":
            two_hosts.kill_daemon()
        else:
            two_hosts.kill()
            two_hosts.join()
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "host host-1 is lost" in output
    if stage == "rollout" and victim != "controller":
        # The other engine has played the lost one's episodes: their rows lie elsewhere, other ranks
        # train on them, and sums of floats differ in their last bits.
        assert largest_difference(directory, "here", name) < 1e-5
    else:
        assert largest_difference(directory, "here", name) == 0.0
    assert_nothing_is_left(two_hosts)


def flow_states(directory: Path, name: str) -> Counter[str]:
    """Of Prefect's flow runs with such a name."""
    (database,) = (directory / "runs").rglob("prefect.db")
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
        query = "select state_type || ' ' || state_name from flow_run where name like ?"
        return Counter(state for (state,) in opened.execute(query, [name]))


def assert_nothing_is_left(hosts: TwoHosts) -> None:
    for number in (0, 1):
        assert hosts.shared_memory(number) == []
        assert hosts.ranks(number) == []


def wait_for(
    ledger: Path, stage: str, iteration: int, seconds: float = 240.0, times: int = 1
) -> None:
    """Until the run has begun this stage so many times."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        begun = {"stage": stage, "iteration": iteration, "event": "started"}
        if sum(begun.items() <= line.items() for line in map(json.loads, lines)) >= times:
            return
        time.sleep(0.02)
    raise AssertionError(f"{stage} {iteration} did not begin")
