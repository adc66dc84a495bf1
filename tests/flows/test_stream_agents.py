"""Agents behind the gateway, and opponents asked of the policy, in a stream of groups: each is
trained once, none is too old, and no time passes while the engine is away."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.conformance.reference import load
from tests.conformance.test_stream import sampled_by
from tests.conformance.test_whole_iterations import TEMPERATURE
from tests.flows.runs import KILLED, Process, Runs
from tests.flows.test_stream import BATCH, assert_once_and_young, stream

pytestmark = pytest.mark.slow

CALL_SECONDS, UPDATE_SECONDS = 3.0, 6.0
AGENT = {
    "agent": "tests.rollout.agents:talking",
    "options": {"turns": {"7": 8, "8": 20, "12": 36}, "patience": UPDATE_SECONDS - 1},
    "call_timeout_seconds": CALL_SECONDS,
    "episode_timeout_seconds": 60.0,
}
ASKING = {
    "name": "tests.rollout.environments:AskingLengths",
    "options": {"every": BATCH, "long": 12},
}


def asked(staleness: int, iterations: int, environment: dict[str, Any]) -> tuple[str, ...]:
    """Overrides of such a run, whose answers take some slices of the engine."""
    return (
        *stream(staleness, iterations),
        f"environment={json.dumps(environment)}",
        "rollout.max_tokens_per_turn=24",
        f"rollout.temperature={TEMPERATURE}",
        f"checkpoint.keep_last={iterations}",
    )


def kept(run: Path, iteration: int) -> list[dict[str, Any]]:
    return pq.read_table(run / f"iterations/{iteration:06d}/episodes.parquet").to_pylist()


def assert_sampled_as_told(runs: Runs, iterations: int) -> None:
    """Each token's log-prob is that of the version that it names, in float64."""
    versions = {0: load(runs.model)}
    versions |= {k + 1: load(runs.policy(k)) for k in range(iterations)}
    for k in range(iterations):
        for row in kept(runs.run(), k):
            assert sampled_by(row, versions) < 1e-4


def wait_for(there: Path, process: Process) -> None:
    deadline = time.monotonic() + 120
    while not there.exists():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, there
        time.sleep(0.05)


def environment_hosts(runs: Runs) -> Iterator[psutil.Process]:
    ranks = {process.pid for process in runs.workers()}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = " ".join(process.info["cmdline"] or ())
        if "environments.hosting.host" in command and process.info["ppid"] in ranks:
            yield process


def test_agents_are_trained_once_and_wait_for_the_learner(runs: Runs) -> None:
    """The controller is killed while agents play. After that an update takes longer than a request
    may; in the next one the agents' host is killed. The longest episode of a batch
    begins at the latest with that of the batch before, and is twice as long."""
    overrides = asked(1, 4, AGENT)
    process = runs.start(*overrides, fault=f"group.taken{BATCH}@1=kill")
    assert process.wait(300) == KILLED
    runs.wait_for_workers_to_end()
    once, gates = runs.directory / "once", runs.directory / "gates"
    runs.environment |= {"EARL_FAULT_ONCE": str(once), "EARL_FAULT_GATE": str(gates)}
    first, second = "update.step0@1", "update.step0@2"
    for each in (once, gates):
        each.mkdir()
    for place in (first, second):
        (gates / place).touch()
    process = runs.start(*overrides, fault=f"{first}=wait;{second}=wait")
    wait_for(once / first, process)
    time.sleep(UPDATE_SECONDS)
    (gates / first).unlink()
    wait_for(once / second, process)
    hosts = list(environment_hosts(runs))
    for host in hosts:
        os.kill(host.pid, signal.SIGKILL)
    (gates / second).unlink()
    assert process.wait(300) == 0, runs.output_path(1).read_text()
    assert hosts
    runs.assert_learnt()
    assert_once_and_young(runs.run(), 1, 4)
    assert_sampled_as_told(runs, 4)
    retried = []
    for line in runs.metrics():
        assert line.get("rollout/calls_timed_out", 0) == line["rollout/episodes_failed"] == 0
        retried.append(line["rollout/episodes_retried"])
    assert retried[:3] == [0, 0, 0]
    assert retried[3] > 0
    # A request was open while the learner made the version that has answered it.
    waited = [row for row in kept(runs.run(), 2) if row["outcome"].startswith("waited")]
    assert waited
    for row in waited:
        assert row["policy_version_last"][int(row["outcome"].split()[1])] == 2
    assert runs.shared_memory() == []


def test_opponents_are_of_versions_as_young_as_the_policys(
    runs: Runs,
) -> None:
    """Stopped in good order while episodes go on: they are played anew, counted, and said to be.
    The long one of a batch begins while that of the batch before goes on, and under a clock it goes
    on when the next version is there."""
    runs.environment["EARL_CLOCK"] = "0"
    overrides = (*asked(2, 4, ASKING), "algorithm.kl={placement: loss, coefficient: 0.1}")
    process = runs.start(*overrides, fault="update.step0@1=raise")
    assert process.wait(300) not in (0, KILLED), runs.output_path(0).read_text()
    runs.wait_for_workers_to_end()
    parked = [json.loads(each.read_bytes()[32:]) for each in (runs.run() / "parked").iterdir()]
    assert parked
    assert [each["episodes"] for each in parked] == [None] * len(parked)
    assert runs.start(*overrides).wait(300) == 0, runs.output_path(1).read_text()
    runs.assert_learnt()
    assert_once_and_young(runs.run(), 2, 4)
    lines = {int(line["iteration"]): line for line in runs.metrics()}
    assert sum(line["rollout/groups_anew"] for line in lines.values()) == len(parked)
    assert sum(line["rollout/groups_resumed"] for line in lines.values()) == 0
    assert all(line["rollout/opponent_calls"] > 0 for line in lines.values())
    told = [line["event"] for line in runs.ledger() if "cannot be replayed" in line["event"]]
    assert told
    switched = 0
    for k in range(4):
        rows = kept(runs.run(), k)
        own = {version for row in rows for version in row["opponent_versions"]}
        assert own
        assert own <= set(range(max(0, k - 2), k + 1))
        switched += any(len(row["opponent_versions"]) > 1 for row in rows)
        collected = json.loads((runs.run() / f"iterations/{k:06d}/collect.json").read_text())
        assert own <= {int(version) for version in collected["outputs"]["versions"]}
    assert switched, "no opponent has gone on under new weights"
