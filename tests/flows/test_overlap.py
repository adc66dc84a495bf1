"""Stale rollouts: side by side with updates, one after another and killed, with equal bits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from tests.flows.runs import KILLED, Runs
from tests.flows.test_imitation import scripted
from tests.flows.test_mixture import GAME, MIXED, PERFECT

Undisturbed = Callable[..., Runs]

STALE = (
    "iterations=4",
    "schedule.staleness=1",
    "algorithm.importance_correction={}",
    "evaluation.every=2",
    "evaluation.episodes=8",
)
SIDE_BY_SIDE = (*STALE, "stages.placement=shared")


def intervals(runs: Runs, stage: str, name: str = "run") -> dict[int, tuple[float, float]]:
    """Start and seal of a stage by iteration, in seconds."""
    times: dict[tuple[int, str], float] = {
        (line["iteration"], line["event"]): line["time"]
        for line in runs.ledger(name)
        if line["stage"] == stage
    }
    return {
        iteration: (times[iteration, "started"], seconds)
        for (iteration, event), seconds in times.items()
        if event == "sealed"
    }


def train_held(runs: Runs, *overrides: str, fault: str, until: str) -> None:
    """Train, held at a fault point of iteration 1 until its stage is in the ledger as started and
    the rollout of iteration 2 as `until`."""
    gate = runs.directory / "gate"
    gate.touch()
    runs.environment["EARL_FAULT_GATE"] = str(gate)
    process = runs.start(*overrides, fault=f"{fault}=wait")
    output = runs.output_path(len(runs.started) - 1)
    deadline = time.monotonic() + 240
    stage = fault.partition(".")[0]
    while not ((2, "rollout") in runs.executed(until) and (1, stage) in runs.executed("started")):
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    gate.unlink()
    process.wait(300)
    assert process.returncode == 0, output.read_text()


def assert_probed(runs: Runs) -> None:
    """Engines have proved that they hold the version of each update that a rollout plays."""
    for line in runs.metrics():
        asked = line["iteration"] > 1
        assert ("rollout/probe_mismatch_max" in line) == asked
        assert line.get("rollout/probe_mismatch_max", 0.0) < 1e-3
        assert line.get("rollout/probe_other_share", 0.0) < 0.1


@pytest.mark.slow
def test_iterations_side_by_side_have_the_bits_of_iterations_in_turn(
    runs: Runs, undisturbed: Undisturbed
) -> None:
    in_turn = undisturbed(*STALE)
    train_held(runs, *SIDE_BY_SIDE, fault="update.step0@1", until="sealed")
    runs.assert_learnt()
    assert [runs.weights(k) for k in range(4)] == [in_turn.weights(k) for k in range(4)]
    assert_probed(runs)
    evaluated = [k for k, stage in runs.executed("sealed") if stage == "evaluation"]
    assert evaluated == [0, 2, 4]
    rollouts, updates = intervals(runs, "rollout"), intervals(runs, "update")
    # The others may be shorter than what Prefect takes to begin a flow run.
    assert rollouts[2][1] < updates[1][1], (rollouts, updates)
    assert runs.shared_memory() == []


@pytest.mark.campaign
def test_killed_and_resumed_has_equal_bits(runs: Runs, undisturbed: Undisturbed) -> None:
    """In the end without shared memory, two iterations before the last one."""
    for moment in ("rollout.seal@1", "stable.after@1"):
        runs.train(*SIDE_BY_SIDE, fault=f"{moment}=kill", expect=KILLED)
        runs.wait_for_workers_to_end()
    for path in runs.shared_memory():
        path.unlink()
    runs.train(*SIDE_BY_SIDE)
    assert runs.weights(3) == undisturbed(*STALE).weights(3)
    assert_probed(runs)
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


CORRECTED = ("iterations=4", "algorithm.importance_correction={}")


def test_a_staleness_that_changes_on_resume_keeps_the_rollouts_that_fit(runs: Runs) -> None:
    """Raised, in the run `up`, and lowered, in `down`, in the middle of iteration 2."""
    fault = "update.step0@2=raise"
    none, one = (*CORRECTED, "schedule.staleness=0"), (*CORRECTED, "schedule.staleness=1")
    endings = runs.train_here(
        {"overrides": [*none, "name=up"], "fault": fault, "lose_memory": True},
        {"overrides": [*one, "name=up"]},
        {"overrides": [*one, "name=down"], "fault": fault},
        {"overrides": [*none, "name=down"]},
    )
    assert endings[1] is endings[3] is None
    for name, ages, told in (
        # What was lost with the shared memory is played again under the same version.
        ("up", [0, 0, 0, 1], "policy version 2 still fits"),
        ("down", [0, 1, 0, 0], "played again by policy version 2, not 1"),
    ):
        runs.assert_learnt(name)
        lines = {line["iteration"]: line for line in runs.metrics(name)}
        assert [lines[k]["update/age_max"] for k in range(4)] == ages, name
        assert any(told in line["event"] for line in runs.ledger(name)), name
    assert runs.executed("sealed", "down").count((2, "rollout")) == 2


@pytest.mark.slow
def test_an_engine_begins_a_rollout_before_the_other_has_ended_the_one_before(runs: Runs) -> None:
    # The first three rollouts wait for no update.
    two = (*CORRECTED, "iterations=3", "schedule.staleness=2", "stages.rollout.replicas=2")
    runs.train(*two, "name=whole")
    train_held(runs, *two, "stages.placement=shared", fault="rollout.played4@1", until="started")
    runs.assert_learnt()
    assert runs.weights(2) == runs.weights(2, "whole")
    rollouts = intervals(runs, "rollout")
    assert rollouts[2][0] < rollouts[1][1]


@pytest.mark.slow
def test_two_iterations_ahead_over_hosts_with_all_that_reads_what_was_played(runs: Runs) -> None:
    """Rollouts read the returns of a mixture with a curriculum, play waves of prompts after an
    iteration that imitates, and outgrow the context that their engines were built for."""
    chats = scripted(runs.directory / "chats.jsonl", 8)
    told = {"data": str(chats), "iterations": 1, "learning_rate": 3e-3}
    everything = (
        *MIXED,
        "iterations=6",
        "environments=" + json.dumps([{**GAME, "label": "weak", "weight": 2}, PERFECT]),
        "rollout.prompts_per_iteration=4",
        f"imitation={json.dumps(told)}",
        "rollout.alike_groups=replace",
        "rollout.max_model_len=16",
        "schedule.staleness=2",
        "algorithm.importance_correction={}",
        "evaluation.every=2",
        "evaluation.episodes=8",
        "cluster.hosts=2",
        "stages.rollout.replicas=2",
        "stages.update.replicas=2",
    )
    runs.train(*everything, "name=whole")
    for moment in ("rollout.seal@3", "update.seal@3"):
        fault = f"{moment}=kill"
        runs.train(*everything, "stages.placement=shared", fault=fault, expect=KILLED)
        runs.wait_for_workers_to_end()
    for path in runs.shared_memory():
        path.unlink()
    runs.train(*everything, "stages.placement=shared")
    runs.assert_learnt()
    assert [runs.weights(k) for k in range(6)] == [runs.weights(k, "whole") for k in range(6)]
    evaluated = sorted({k for k, stage in runs.executed("sealed") if stage == "evaluation"})
    assert evaluated == [0, 2, 4, 6]
    here, there = runs.metrics(), runs.metrics("whole")
    last = {line["iteration"]: line for line in here}
    assert [last[k]["update/age_max"] for k in range(1, 6)] == [1, 2, 2, 2, 2]
    assert max(line["rollout/waves"] for line in there[1:]) > 1
    assert max(line["rollout/context/max"] for line in there[1:]) > 16
    runs.wait_for_workers_to_end()
    assert runs.shared_memory() == []
