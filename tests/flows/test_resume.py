"""Killed runs continue: nothing finished is repeated, no update is applied twice, equal bits."""

from __future__ import annotations

import pytest

from tests.flows.runs import Runs

STAGES = ["select", "rollout", "reward", "reference", "advantage", "update", "publish"]
KILLED = -9


def assert_each_stage_sealed_once(runs: Runs, iterations: int, name: str = "run") -> None:
    sealed = runs.executed("sealed", name)
    for iteration in range(iterations):
        for stage in STAGES:
            assert sealed.count((iteration, stage)) == 1, (iteration, stage, sealed)


def test_killed_in_every_stage_equals_an_uninterrupted_run(runs: Runs) -> None:
    """One run is killed at the seal of every stage in turn; its twin is left alone."""
    runs.train("name=whole")
    for stage in STAGES:
        runs.train(fault=f"{stage}.seal@1=kill", expect=KILLED)
        runs.wait_for_workers_to_end()
    runs.train()
    assert_each_stage_sealed_once(runs, 2)
    for iteration in range(2):
        assert runs.weights(iteration) == runs.weights(iteration, "whole")
    applied = [x for x in runs.ledger() if x["event"].startswith("steps applied")]
    # The update of iteration 1 was done twice, from the same state: the first time it was killed
    # before the seal, with a checkpoint on disk that the seal would have declared.
    assert [x["iteration"] for x in applied] == [0, 1, 1]
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_between_stages(runs: Runs, moment: str) -> None:
    runs.train("name=whole")
    for stage in STAGES:
        runs.train(fault=f"{stage}.{moment}@1=kill", expect=KILLED)
    runs.train()
    assert_each_stage_sealed_once(runs, 2)
    for stage in STAGES:
        events = [x["event"] for x in runs.ledger() if (x["iteration"], x["stage"]) == (1, stage)]
        assert "started" not in events[events.index("sealed") :], (stage, events)
    assert runs.weights(1) == runs.weights(1, "whole")
    assert runs.shared_memory() == []


@pytest.mark.parametrize(
    "fault",
    [
        "update.applied@1=kill",
        pytest.param("update.step0@1=kill", marks=pytest.mark.slow),
        pytest.param("update.save@1=enospc", marks=pytest.mark.slow),
    ],
)
def test_failures_inside_the_update(runs: Runs, fault: str) -> None:
    """Between optimizer steps, after the last one, and with a full disk at the checkpoint."""
    runs.train("name=whole")
    output = runs.train(fault=fault, expect=1)
    assert "update" in output
    runs.train()
    assert_each_stage_sealed_once(runs, 2)
    assert runs.weights(1) == runs.weights(1, "whole")
    assert runs.shared_memory() == []


def test_a_lost_shard_repeats_its_stage_only(runs: Runs) -> None:
    runs.train("name=whole")
    runs.train(fault="update.before@1=kill", expect=KILLED)
    (shard,) = (path for path in runs.shared_memory() if "000001-reward" in path.name)
    shard.unlink()
    runs.train()
    sealed = runs.executed("sealed")
    assert sealed.count((1, "reward")) == 2
    assert sealed.count((1, "rollout")) == sealed.count((1, "advantage")) == 1
    assert runs.weights(1) == runs.weights(1, "whole")


def test_a_finished_run_is_left_alone(runs: Runs) -> None:
    runs.train()
    before = runs.executed("started")
    weights = runs.weights(1)
    runs.train()
    assert runs.executed("started") == before
    assert runs.weights(1) == weights
    assert runs.shared_memory() == []


def test_sparse_checkpoints_replay_from_shards(runs: Runs) -> None:
    """What lies between checkpoint and kill is repeated, but no episode is played anew."""
    sparse = ("checkpoint.every=3", "iterations=3")
    runs.train("name=whole", *sparse)
    runs.train(*sparse, fault="reward.after@2=kill", expect=KILLED)
    runs.train(*sparse)
    sealed = runs.executed("sealed")
    assert [sealed.count((k, "rollout")) for k in range(3)] == [1, 1, 1]
    assert [sealed.count((k, "update")) for k in range(3)] == [2, 2, 1]
    assert runs.weights(2) == runs.weights(2, "whole")
