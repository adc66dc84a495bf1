"""Faults of one rank of a two-rank update in a run: a clear error, nothing left, and a resume
that ends with the right number of updates."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from earl_core.learner.checkpoint import verify_training_state
from tests.flows.runs import KILLED, LEARNING, Runs
from tests.flows.runs import STAGES as ALL_STAGES

RANKS = (
    "iterations=6",
    "layout.update.shard=2",
    "update.max_tokens_per_microbatch=8",
    "algorithm.kl={placement: none, coefficient: 0}",
    "deadlines.heartbeat=4",
)
STAGES = [stage for stage in ALL_STAGES if stage != "reference"]

FAULTS = [
    ("update.step0", 1, "kill", "SIGKILL"),
    ("update.save", 0, "kill", "SIGKILL"),
    ("publish.write", 1, "kill", "SIGKILL"),
    ("update.microbatch2", 1, "stop", "no heartbeat"),
    ("update.microbatch3", 1, "memory", "microbatch 3 of"),
    ("update.save", 1, "enospc", "No space left on device"),
]
"""One of each kind; every point is tried on each rank where a worker group is looked at alone."""


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


@pytest.mark.slow
def test_a_run_with_a_fault_of_one_rank_in_every_iteration(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """Each fault ends the process with its reason; the next process goes on to the next fault."""
    for iteration, (point, rank, action, reason) in enumerate(FAULTS):
        fault = f"{point}@{iteration}:{rank}={action}"
        output = runs.train(*RANKS, fault=fault, expect=1)
        assert reason in output, (fault, output)
        assert re.search(rf"stage '(update|publish)' of iteration {iteration}\b", output), fault
        assert re.search(r"its log .*update-\d\.log:\n", output), fault
        if action != "enospc":
            assert f"rank {rank}" in output, fault
        runs.wait_for_workers_to_end()
    runs.train(*RANKS)
    assert_whole(runs, len(FAULTS))
    last = len(FAULTS) - 1
    assert runs.weights(last) == undisturbed(*RANKS).weights(last)


@pytest.mark.slow
def test_a_killed_controller_and_a_resume_with_another_mesh(runs: Runs) -> None:
    short = (*RANKS, "iterations=2")
    runs.train(*short, fault="publish.before@0=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*short, "layout.update={tensor_parallel: 2}")
    # Another layout is another plan; everything else that was finished stays finished.
    assert_whole(runs, 2, [stage for stage in STAGES if stage != "select"])


@pytest.mark.slow
def test_meshes_change_without_a_checkpoint(runs: Runs, undisturbed: Callable[..., Runs]) -> None:
    """Live from 2 ranks to 2 others, through a state on disk to 1 and to 2 again; one curve."""
    changes = (
        "[{iteration: 1, update: {tensor_parallel: 2}}, {iteration: 2, update: {}},"
        " {iteration: 3, update: {replicate: 2}}]"
    )
    layout = ("layout.update.shard=2", f"layout.changes={changes}")
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


@pytest.mark.slow
def test_a_checkpoint_directory_that_fills_up(
    runs: Runs, undisturbed: Callable[..., Runs], small_disk: Path
) -> None:
    output = runs.train(*RANKS, expect=1)
    assert "No space left on device" in output
    assert re.search(r"rank \d.*stage 'update' of iteration 0", output)
    assert list(small_disk.iterdir()) == []
    runs.wait_for_workers_to_end()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    runs.train(*RANKS, "iterations=2")
    assert_whole(runs, 2)
    assert runs.weights(1) == undisturbed(*RANKS, "iterations=2").weights(1)
