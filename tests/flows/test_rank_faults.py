"""Ranks that die at work: the stage is repeated, nothing is left, and the weights are those of an
undisturbed run. What a program raises ends the run, with a clear error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from earl_core.run.checkpoints import verify_training_state
from tests.flows.runs import KILLED, LEARNING, Runs
from tests.flows.runs import STAGES as ALL_STAGES

NO_KL = "algorithm.kl={placement: none, coefficient: 0}"
RANKS = (
    "iterations=6",
    "stages.update.shard=2",
    "update.max_tokens_per_microbatch=8",
    NO_KL,
)
STAGES = [stage for stage in ALL_STAGES if stage != "reference"]

LOSSES = [
    ("update.step0", 1, "kill"),
    ("update.save", 0, "kill"),
    ("publish.write", 1, "kill"),
    ("update.microbatch2", 1, "stop"),
]
"""A loss in each of the first iterations; every point is tried on each rank where a worker group is
looked at alone."""

FAILURES = [
    ("update.microbatch3", 1, "memory", "microbatch 3 of"),
    ("update.save", 1, "enospc", "No space left on device"),
]
"""What a program raised: the next iterations end with it."""


def assert_whole(runs: Runs, iterations: int, stages: Sequence[str] = STAGES) -> None:
    """Every stage was sealed once, and the last checkpoint has that many updates in it."""
    sealed = runs.executed("sealed")
    for iteration in range(iterations):
        for stage in stages:
            assert sealed.count((iteration, stage)) == 1, (iteration, stage)
    state = verify_training_state(runs.run() / "checkpoints" / f"{iterations - 1:06d}")
    assert state["policy_version"] == iterations
    assert not list((runs.run() / "checkpoints").glob(".*"))
    assert not (runs.run() / "handoff").exists()
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


def repeats(runs: Runs) -> list[tuple[int, str]]:
    """(iteration, stage) of everything that was repeated because ranks were lost."""
    lines = [x for x in runs.ledger() if "the stage is repeated" in x["event"]]
    return [(x["iteration"], x["stage"]) for x in lines]


def test_ranks_of_every_role_die_at_work_and_the_run_goes_on(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """One process, seven kills: as the run is opened, while weights are published, after a shard
    was sealed but before it was reported, and in an update whose steps were applied already."""
    runs.environment["EARL_FAULT_ONCE"] = str(runs.directory)
    first = ("experience.check@0", "publish.write@0", "rollout.sealed0@0", "reference.written@0")
    second = ("reward.written@1", "advantage.written@1", "update.applied@1")
    output = runs.train(fault=";".join(f"{point}=kill" for point in (*first, *second)))
    assert repeats(runs) == [
        (0, "initial"), (0, "rollout"), (0, "reference"),
        (1, "reward"), (1, "advantage"), (1, "update"),
    ]  # fmt: skip
    assert "rollout-0' rank 0 was lost (its process was killed by signal 9 (SIGKILL))" in output
    assert [line["recovery/stages_repeated"] for line in runs.metrics()] == [3, 3]
    assert_whole(runs, 2, ALL_STAGES)
    assert runs.weights(1) == undisturbed().weights(1)


def test_a_learner_lost_between_checkpoints_is_trained_again(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """Within the process, from the shards: no episode is played twice."""
    runs.environment["EARL_FAULT_ONCE"] = str(runs.directory)
    runs.train("checkpoint.every=2", fault="update.step0@1=kill")
    assert repeats(runs) == [(1, "update")]
    sealed = runs.executed("sealed")
    assert [sealed.count((k, "rollout")) for k in range(2)] == [1, 1]
    assert [sealed.count((k, "update")) for k in range(2)] == [2, 1]
    assert runs.weights(1) == undisturbed().weights(1)
    assert runs.shared_memory() == []


def test_too_many_losses_and_errors_of_the_program_end_the_run(runs: Runs) -> None:
    settings = ("iterations=1", "deadlines.repeats=1", NO_KL)
    output = runs.train(*settings, fault="reward.written@0=kill", expect=1)
    assert "SIGKILL" in output
    assert repeats(runs) == [(0, "reward")]
    assert any("not repeated, loss 2 of 1" in line["event"] for line in runs.ledger())
    output = runs.train(*settings, fault="advantage.written@0=raise", expect=1)
    assert "injected failure at advantage.written@0" in output
    assert len(repeats(runs)) == 1
    runs.wait_for_workers_to_end()


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_run_with_a_fault_of_one_rank_in_every_iteration(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """A lost rank has its stage repeated in the same process; what a program raises ends it."""
    runs.environment["EARL_FAULT_ONCE"] = str(runs.directory)
    faults = [(point, rank, action) for point, rank, action, _ in FAILURES]
    fault = ";".join(
        f"{point}@{iteration}:{rank}={action}"
        for iteration, (point, rank, action) in enumerate([*LOSSES, *faults])
    )
    silent = "deadlines.heartbeat=4"
    for iteration, (_, _, _, reason) in enumerate(FAILURES, len(LOSSES)):
        output = runs.train(*RANKS, silent, fault=fault, expect=1)
        assert reason in output, output
        assert re.search(rf"stage 'update' of iteration {iteration}\b", output), output
        assert re.search(r"its log .*update-\d\.log:\n", output), output
        runs.wait_for_workers_to_end()
    runs.train(*RANKS, silent)
    stages = [point.partition(".")[0] for point, _, _ in LOSSES]
    assert repeats(runs) == list(enumerate(stages))
    assert_whole(runs, len(LOSSES) + len(FAILURES))
    last = len(LOSSES) + len(FAILURES) - 1
    assert runs.weights(last) == undisturbed(*RANKS).weights(last)


@pytest.mark.slow
def test_a_killed_controller_and_a_resume_with_another_mesh(runs: Runs) -> None:
    short = (*RANKS, "iterations=2")
    runs.train(*short, fault="publish.before@0=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*short, "stages.update={tensor_parallel: 2}")
    # Another layout is another plan; everything else that was finished stays finished.
    assert_whole(runs, 2, [stage for stage in STAGES if stage != "select"])


@pytest.mark.campaign
def test_meshes_change_without_a_checkpoint(runs: Runs, undisturbed: Callable[..., Runs]) -> None:
    """Live from 2 ranks to 2 others, through a state on disk to 1 and to 2 again; one curve."""
    changes = (
        "[{iteration: 1, update: {tensor_parallel: 2}}, {iteration: 2, update: {}},"
        " {iteration: 3, update: {replicas: 2}}]"
    )
    layout = ("stages.update.shard=2", f"stages.changes={changes}")
    runs.train(*LEARNING, "checkpoint.every=4", *layout)
    assert_whole(runs, 4)
    expected = undisturbed(*LEARNING).metrics()
    for changed, whole in zip(runs.metrics(), expected, strict=True):
        assert changed["reward/mean"] == pytest.approx(whole["reward/mean"], abs=1e-6)
        assert changed["update/grad_norm"] == pytest.approx(whole["update/grad_norm"], rel=1e-4)


@pytest.fixture
def small_disk(runs: Runs) -> Iterator[Path]:
    """A file system of its own for the run's checkpoints, which one fits into."""
    path = runs.run() / "checkpoints"
    path.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if os.geteuid() != 0 or mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.campaign
def test_a_checkpoint_directory_that_fills_up(
    runs: Runs, undisturbed: Callable[..., Runs], small_disk: Path
) -> None:
    output = runs.train(*RANKS, expect=1)
    assert re.search(r"a checkpoint needs [\d,]+ bytes, and .*checkpoints has [\d,]+ left", output)
    assert (0, "rollout") not in runs.executed("started")
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    gate = runs.directory / "gate"
    gate.touch()
    runs.environment["EARL_FAULT_GATE"] = str(gate)
    process = runs.start(*RANKS, fault="update.step0@0=wait")
    while (0, "update") not in runs.executed("started"):
        assert process.poll() is None, runs.output_path(1).read_text()
        time.sleep(0.02)
    assert runs.workers(), "none would be seen to stay"
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(b"1" * (free - 2**13))
    gate.unlink()
    assert process.wait(300) == 1
    output = runs.output_path(1).read_text()
    assert "No space left on device" in output
    assert re.search(r"rank \d.*stage 'update' of iteration 0", output)
    filler.unlink()
    assert list(small_disk.iterdir()) == []
    runs.wait_for_workers_to_end()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    runs.train(*RANKS, "iterations=2")
    assert_whole(runs, 2)
    assert runs.weights(1) == undisturbed(*RANKS, "iterations=2").weights(1)
